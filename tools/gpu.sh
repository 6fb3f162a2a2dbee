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
# Small shapes: the sanitizer makes kernels some hundred times slower.
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck; do
    timeout 120 compute-sanitizer --tool "$tool" --error-exitcode 3 --log-file "$out/$tool.txt" \
      "$python" -m pytest -q -p no:cacheprovider -m gpu tests/kernels/test_kernels.py \
      tests/kernels/test_compact_cuda.py \
      -k "all_rows_on_one_expert or permuted or absent or read_sum or damaged" || status=$?
  done
else
  echo "make gpu: compute-sanitizer is not on the PATH; kernels were not run under it" >&2
fi
"$python" -m speq doctor --device cuda --json "$out/doctor.json" || status=$?
"$python" -m speq bench kernels --device cuda --shapes qwen1.5-moe,qwen3-30b-a3b,mixtral-8x7b \
  --rows 1,4,16 --json "$out/kernels.json" --force || status=$?
"$python" -m speq bench step models/tiny-moe --device cuda --memory-budget 48MiB \
  --json "$out/step-tiny-moe.json" --force || status=$?
# Experts from pinned host memory, two budgets; nothing here is shaped to look well.
"$python" -m speq check models/tiny-moe --device cuda --dtype float32 --memory-budget 40MiB \
  --json "$out/check-tiny-moe.json" --force || status=$?
"$python" -m speq bench tpot models/tiny-moe --device cuda --budgets 24MiB,48MiB \
  --draft-lengths 0,2,4 --rounds 3 --json "$out/tpot-tiny-moe.json" --force || status=$?
ls -l "$out"
exit "$status"
