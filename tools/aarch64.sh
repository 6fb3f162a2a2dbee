#!/usr/bin/env bash
# Sees to it that kernels for aarch64 can be built and run on another processor: Debian's cross
# compiler and QEMU, where they are missing.
set -euo pipefail
if command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64-static > /dev/null; then
  exit 0
fi
exec "$(dirname "$0")/install.sh" g++-aarch64-linux-gnu qemu-user-static
