# Everything runs in .venv of this checkout, made at first use. `make help` lists the targets.
#
#   PYTHON     interpreter the environment is made from (3.10 or later)
#   PIP_ARGS   further arguments of pip install, e.g. an index with CPU builds of torch

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
TESTS ?= tests
PYTEST_ARGS ?=

# Lanes of a warp for which the host backend is compiled; the tests run at each.
HOST_LANES ?= 1;32;64

# Hundreds of processes import the sources: none but the first has to compile them.
unexport PYTHONDONTWRITEBYTECODE

NATIVE_SOURCES := $(shell git ls-files -co --exclude-standard -- '*.cpp' '*.hpp' '*.c' '*.h' '*CMakeLists.txt' '*cffi*.py' 2>/dev/null \
    || find core gpu_backends transports -name '*.[ch]pp' -o -name '*.[ch]' -o -name CMakeLists.txt)

.PHONY: help install demo test test-full verify softroce kernels bench lint format native-test build clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | column -t -s "$$(printf '\t')"

# The environment: what is needed to build and to test, torch included.
$(VENV)/.environment: pyproject.toml constraints.txt .ci/prepare
	@.ci/prepare "$(PYTHON)"
	@test -x $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -c 'import tomllib' 2>/dev/null || $(PIP) tomli
	@$(BIN)/python .ci/requirements.py build-system dependencies test > $(VENV)/requirements.txt
	@.ci/step "installing torch and the tools to build and test into $(VENV): 1 to 10 minutes, as quick as the network" \
	    $(PIP) -r $(VENV)/requirements.txt cmake ninja
	@touch $@

# The package, editable: Python sources act at once, native ones are compiled again when they change.
$(VENV)/.installed: $(VENV)/.environment $(NATIVE_SOURCES) plugins.toml
	@PATH="$(CURDIR)/$(BIN):$$PATH" .ci/step "compiling uccl_ep for lanes $(HOST_LANES): about 2 minutes on two cores" \
	    $(PIP) --no-build-isolation --no-deps -e . -C 'cmake.define.UCCL_EP_HOST_LANES=$(HOST_LANES)'
	@touch $@

install: $(VENV)/.installed  ## make .venv and install uccl_ep into it

demo: $(VENV)/.installed  ## dispatch and combine between 4 processes, checked and timed, on this machine
	@echo "running the demo: less than a minute"
	@$(BIN)/python -m uccl_ep.demo

test: $(VENV)/.installed  ## the tests
	@echo "running the tests: about 20 minutes on two cores"
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS) $(TESTS)

test-full: $(VENV)/.installed  ## the tests with every seed and the long runs
	@$(BIN)/python -m pytest -q -m "full or not full" $(PYTEST_ARGS) $(TESTS)

$(VENV)/.verify: $(VENV)/.environment
	@.ci/packages spin:/usr/bin/spin relacy-dev:/usr/include/relacy/relacy.hpp
	@$(BIN)/python .ci/requirements.py verify > $(VENV)/verify.txt
	@$(PIP) -r $(VENV)/verify.txt
	@touch $@

verify: $(VENV)/.installed $(VENV)/.verify  ## the models of the channel and of the ordering protocol
	@$(BIN)/python core/verification/run.py

softroce: $(VENV)/.installed  ## the ibverbs transport on the kernel's software RDMA devices
	@transports/ibverbs/softroce/run

# The compilers of `make kernels`, as Python packages: NVRTC, and clang with lld for AMD.
$(VENV)/.kernels: $(VENV)/.environment
	@$(BIN)/python .ci/requirements.py kernels > $(VENV)/kernels.txt
	@$(PIP) -r $(VENV)/kernels.txt
	@touch $@

kernels: $(VENV)/.installed $(VENV)/.kernels  ## compile every kernel for every listed GPU architecture
	@$(BIN)/python -m uccl_ep_core.kernels_compile

bench: $(VENV)/.installed  ## dispatch and combine against a gloo all-to-all in the same run
	@$(BIN)/uccl-ep bench ep

$(VENV)/.lint: $(VENV)/.environment
	@$(BIN)/python .ci/requirements.py lint > $(VENV)/lint.txt
	@$(PIP) -r $(VENV)/lint.txt
	@touch $@

lint: $(VENV)/.lint  ## linter, formatters (check only) and type checker
	@.ci/lint

format: $(VENV)/.lint  ## let the formatters rewrite the sources
	@.ci/lint --fix

native-test: $(VENV)/.environment  ## the native tests under the address, undefined and thread sanitizers
	@.ci/native_tests

build: $(VENV)/.environment  ## a wheel in dist/
	@rm -rf dist
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	@ls dist/*.whl

clean:  ## remove all that was built, .venv too
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
