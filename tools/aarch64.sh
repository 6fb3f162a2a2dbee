#!/usr/bin/env bash
# Sees to it that kernels for aarch64 can be built and run on another processor: Debian's cross
# compiler and QEMU, where they are missing.
set -euo pipefail
if command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64-static > /dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "tools/aarch64.sh: only root on a Debian can install what is missing; install" \
    "g++-aarch64-linux-gnu and qemu-user-static" >&2
  exit 1
fi
echo "installing a compiler for aarch64, and QEMU"
apt-get update -q > /dev/null
DEBIAN_FRONTEND=noninteractive \
  apt-get install -qy --no-install-recommends g++-aarch64-linux-gnu qemu-user-static > /dev/null
