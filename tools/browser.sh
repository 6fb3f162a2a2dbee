#!/usr/bin/env bash
# Sees to it that there is a browser for the tests of pages: Debian's Chromium, where there is none.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" > /dev/null; then exit 0; fi
done
# Without fonts it draws no letters.
exec "$(dirname "$0")/install.sh" chromium fonts-liberation
