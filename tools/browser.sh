#!/usr/bin/env bash
# Sees to it that there is a browser for the tests of pages: Debian's Chromium, where there is none.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" > /dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "tools/browser.sh: there is no browser here, and only root on a Debian can install one;" \
    "install chromium" >&2
  exit 1
fi
echo "installing chromium"
apt-get update -q > /dev/null
# Without fonts it draws no letters.
DEBIAN_FRONTEND=noninteractive \
  apt-get install -qy --no-install-recommends chromium fonts-liberation > /dev/null
