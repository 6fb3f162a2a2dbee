#!/usr/bin/env bash
# Builds the kernels, those for CUDA to run on the host, under AddressSanitizer and
# UndefinedBehaviorSanitizer, and runs their tests against that build; parallel regions under
# ThreadSanitizer.
#   PYTHON  interpreter of the environment that `make setup` made     OUT  build folder
#   TESTS   the kernels' tests that are run, as pytest's -m takes them
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
out=$(realpath -m "${OUT:-build/sanitized}")
PATH="$(dirname "$python"):$PATH"

# The interpreter is not built with the sanitizers, so their libraries must be there before it is;
# libstdc++ too, or they would miss the exceptions that it throws.
preload=""
for library in libasan.so libubsan.so libstdc++.so.6; do
  path=$(${CXX:-g++} -print-file-name="$library")
  [ -e "$path" ] || { echo "tools/sanitize.sh: ${CXX:-g++} has no $library; install it" >&2; exit 1; }
  preload="$preload $path"
done

torch=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
cmake -GNinja -S. -B"$out/cmake" -DCMAKE_BUILD_TYPE=Release -DTORCH_PREFIX="$torch" \
  -DSPEQ_SANITIZE=ON -DSPEQ_WERROR=ON -DSPEQ_CUDA=OFF > "$out.log" 2>&1 || { cat "$out.log" >&2; exit 1; }
cmake --build "$out/cmake" --target speq_cpu speq_cuda_on_host speq_regions_raced >> "$out.log" 2>&1 ||
  { cat "$out.log" >&2; exit 1; }
"$python" setup.py -q build_py --build-lib "$out/package" 2>> "$out.log"
cp "$out"/cmake/libspeq_*.so "$out/package/speq/"

# Under the sanitizer of threads, which allows no threads in a forked child.
"$out/cmake/speq_regions_raced" sizes many threads exceptions nested callers environment

# Away from the sources, which would be imported first.
rm -rf "$out/package/tests"
cp -r tests "$out/package/"
root=$PWD
cd "$out/package"
# Leaks are the interpreter's own business: it never gives back what it made at start.
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 \
  "$python" -m pytest -q -c "$root/pyproject.toml" --rootdir . -p no:cacheprovider -n "${JOBS:-auto}" \
  --dist worksteal --need cuda_on_host -m "${TESTS:-not wide and not full and not gpu}" tests/kernels "$@"
