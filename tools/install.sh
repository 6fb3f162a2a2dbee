#!/usr/bin/env bash
# Installs packages of Debian that tests ask for: tools/install.sh PACKAGE...
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "tools/install.sh: only root on a Debian can install packages; install $*" >&2
  exit 1
fi
echo "installing $*"
apt-get update -q > /dev/null
DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@" > /dev/null
