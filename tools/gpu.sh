#!/usr/bin/env bash
# On a machine with a GPU, without network: build, run the tests that need one, measure.
# Takes the interpreter's own torch and transformers, and installs this checkout into it.
#   PYTHON  interpreter (python3)     OUT  folder for the JSON results
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-build/gpu}
mkdir -p "$out"

"$python" - <<'EOF'
import sys
try:
    import torch
except ImportError:
    sys.exit(f"make gpu: {sys.executable} has no torch; set PYTHON to one that has a CUDA build")
if not torch.cuda.is_available():
    sys.exit("make gpu: torch sees no CUDA device here; run it on a machine with a GPU")
print(torch.cuda.get_device_name(), "torch", torch.__version__)
EOF
"$python" -m pip install -q --no-index --no-deps --no-build-isolation -e .

status=0
"$python" -m pytest -q -p no:cacheprovider -m gpu --junitxml="$out/tests.xml" || status=$?
# Experts from pinned host memory, two budgets; nothing here is shaped to look well.
"$python" -m speq check models/tiny-moe --device cuda --dtype float32 --memory-budget 40MiB \
  --json "$out/check-tiny-moe.json" --force || status=$?
"$python" -m speq bench tpot models/tiny-moe --device cuda --budgets 24MiB,48MiB \
  --draft-lengths 0,2,4 --rounds 3 --json "$out/tpot-tiny-moe.json" --force || status=$?
ls -l "$out"
exit "$status"
