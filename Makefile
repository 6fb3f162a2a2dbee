# make demo       set up, build, and generate text from the bundled model under a small budget
# make wheels     wheels and the source distribution in dist/, tried without a compiler
# make test       set up, lint, and run the tests
# make host       the CUDA kernels for the processor, which `make test` needs
# make wide       what CI runs besides: wider products
# make test-full  all of that, and the long products as well
# make clients    programs that others wrote, against the server
# make soak       long runs of faults, cancellations and hostile files; N=10000: so many schedules
# make newest     the exactness tests in short, on the newest transformers of the package index
# make releases   the exactness tests of every family on the oldest supported transformers and on the newest
# make sanitize   the kernels and their tests under AddressSanitizer and UBSan
# make gpu        on a machine with a GPU: test and measure there, JSON to $OUT; GPU_ARGS has more
# make rehearse   `make gpu` without a GPU, up to its first calls of one
PYTHON ?= python3
# A CPU-only torch is enough, and is what a machine without a card gets; set TORCH to the build you
# want, a wheel's path included.
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.23.0
VENV ?= .venv
OUT ?= build/gpu
GPU_ARGS ?=
# What tests may not be skipped for lack of, such as browser.
NEED ?=
# Such as --torch 2.11.0 --transformers 5.17.0, which are gigabytes; without: as installed.
REHEARSE_ARGS ?=
# Of the kernels' tests, those that `make sanitize` runs, as pytest's -m takes them: by default the quick ones.
TESTS ?=
# Programs for `make clients`; all of them where it names none.
CLIENTS ?=

BIN := $(VENV)/bin
# What developers need is installed, or what runs need.
READY := $(VENV)/.ready
RUNS := $(VENV)/.runs
PIP = $(BIN)/python -m pip install -q --disable-pip-version-check
# Files that the drivers of a GPU make.
CARD := $(wildcard /dev/nvidiactl /dev/dxg)
CPU_INDEX := https://download.pytorch.org/whl/cpu
NATIVE := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')
SOURCES := pyproject.toml setup.py CMakeLists.txt speq/VERSION $(shell find csrc cmake -type f)

.PHONY: setup demo wheels host test wide test-full clients soak newest releases sanitize lint format gpu rehearse clean

setup: $(READY)

# Extras of pyproject.toml, arguments of CMake. PyPI has only torch's CUDA build for Linux.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; set PYTHON to a newer one" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "1/2 torch and transformers: 0.3 GB to fetch, or 3 GB with CUDA"
	@index=$$(test -n "$(CARD)" || $(BIN)/python -c 'from urllib.request import urlopen as u; u("$(CPU_INDEX)/torch/", timeout=5)' \
	  2> /dev/null && echo "--extra-index-url $(CPU_INDEX)"); \
	  $(PIP) $$index "$(TORCH)" "$(TRANSFORMERS)" "setuptools>=77" wheel cmake ninja
	@echo "2/2 compiling the kernels: about two minutes on two cores$(if $(findstring OFF,$(2)),,, and five more for CUDA where there is nvcc)"
	@CMAKE_ARGS="$(2) $(CMAKE_ARGS)" $(PIP) --no-build-isolation -e ".[$(1)]"
endef

$(READY): $(SOURCES)
	$(call install,dev,-DSPEQ_WERROR=ON)
	@touch $(RUNS) $@

$(RUNS): $(SOURCES)
	$(call install,serve,$(if $(CARD),,-DSPEQ_CUDA=OFF))
	@touch $@

demo: $(RUNS)
	@$(BIN)/speq demo

wheels: $(READY)
	$(BIN)/python -m tools.wheels

# The CUDA kernels for the processor, and what lets torch without CUDA take part: tests need no GPU.
HOST := build/host/.ready
TORCH_PREFIX = $(shell $(BIN)/python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
host: $(HOST)
$(HOST): $(READY) $(shell find tests/cuda_host tests/cpu_pool -type f)
	@echo "building the CUDA kernels for the processor"
	@mkdir -p build
	@PATH="$(abspath $(BIN)):$$PATH" cmake -GNinja -S. -Bbuild/host -DCMAKE_BUILD_TYPE=Release \
	  -DTORCH_PREFIX="$(TORCH_PREFIX)" -DSPEQ_CUDA=OFF > build/host.log || { cat build/host.log >&2; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" cmake --build build/host \
	  --target speq_cuda_on_host speq_host_guard speq_regions >> build/host.log || { cat build/host.log >&2; exit 1; }
	@touch $@

PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal $(addprefix --need ,$(NEED))

test: lint host
	$(PYTEST) -m "not wide and not full and not gpu"

wide: host
	$(PYTEST) --need torch-headers --need sass -m "wide and not full and not gpu"

test-full: lint rehearse host
	$(MAKE) sanitize TESTS="not full and not gpu"
	$(PYTEST) -m "not gpu"
	$(MAKE) releases

# Environments in build/clients, 2.5 GB: a few minutes the first time. CLIENTS=codex runs one.
clients: $(READY)
	$(BIN)/python -m tools.clients $(CLIENTS)

# N: schedules of a simulated disk, clock and interrupts.
N ?= 300
soak: host
	$(BIN)/python -m tests.simulation --schedules $(N)
	$(PYTEST) -m "not gpu" tests/fuzz tests/server/test_random_cancellations.py \
	  tests/product/test_faults.py tests/product/test_random_batches.py

# Environments of their own beside $(VENV), such as $(VENV)-newest, which share its large packages.
newest: host
	$(BIN)/python -m tools.releases newest

releases: host
	$(BIN)/python -m tools.releases --whole oldest newest

# The kernels written for a GPU run here on the processor, which is slow and finds every stray access.
sanitize: $(READY)
	PYTHON=$(BIN)/python TESTS="$(TESTS)" tools/sanitize.sh

# setup.py lays `scheduler/`, `governor/` and `bench/` into the package; mypy wants to see it so.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	@rm -rf build/typed && $(BIN)/python setup.py -q build_py --build-lib build/typed 2>/dev/null
	$(BIN)/mypy --config-file pyproject.toml build/typed/speq tools bench/lab

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

# No network and no venv of ours: the machine's own torch and transformers are what is measured.
gpu:
	PYTHON="$(PYTHON)" OUT="$(OUT)" tools/gpu.sh $(GPU_ARGS)

rehearse: $(READY)
	$(BIN)/python -m tools.rehearse $(REHEARSE_ARGS)

clean:
	rm -rf build dist $(VENV) $(VENV)-oldest $(VENV)-pinned $(VENV)-newest speq/*.so speq_moe.egg-info
