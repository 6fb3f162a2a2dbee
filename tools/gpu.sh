#!/usr/bin/env bash
# On a machine with a GPU, without network: test and measure there (tools/gpu.py, which takes the
# arguments).
#   PYTHON  interpreter with torch and transformers (python3)     OUT  folder for gpu.json
set -euo pipefail
out=$(realpath -m "${OUT:-build/gpu}")
python=${PYTHON:-python3}
[[ $python == */* ]] && python=$(realpath -s "$python")
cd "$(dirname "$0")/.."
exec "$python" -m tools.gpu --out "$out" "$@"
