# Everything happens in the checkout: a virtual environment in .venv, native libraries in
# elasticep/_lib. `make build` is incremental; stamps say what was done.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# What a checkout installs besides the package's own dependencies.
EXTRAS ?= local,cuda,nixl,engines,plot,dev
# AUTO: when nvcc is found. ON, OFF.
ELASTICEP_CUDA ?= AUTO
JOBS ?= $(shell nproc)
PYTEST_ARGS ?=
# Files at a time: most tests wait for processes.
PYTEST_WORKERS ?= 2
# Random schedules of faults that the simulator runs in the long tests.
SCHEDULES ?= 2000
export ELASTICEP_TEST_SCHEDULES := $(SCHEDULES)
# Seconds of each of the eight runs of random views on an emulated GPU.
SOAK_S ?= 30
export ELASTICEP_TEST_SOAK_S := $(SOAK_S)
# Tests start hundreds of processes; without it each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

BUILD := build/native
CMAKE := $(or $(shell command -v cmake),$(VENV)/bin/cmake)
NINJA := $(or $(shell command -v ninja),$(VENV)/bin/ninja)

.PHONY: build native native-cpu demo test test-long test-all lint format proto gpu-build test-gpu gpu-acceptance model sim wheel clean distclean
.DEFAULT_GOAL := build

build: native

# --- environment
$(VENV)/created.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "elasticep needs Python 3.11 or newer; set PYTHON=python3.11" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@touch $@

# One install of everything, pinned; the package itself becomes a path entry (its native parts are
# built by the `native` target, not by pip). Without build isolation, which would fetch torch again;
# setuptools builds etcd3, which has no wheel.
DEPS := $(VENV)/deps.stamp
$(DEPS): $(VENV)/created.stamp pyproject.toml constraints.txt
	$(PY) -m pip install --quiet -c constraints.txt scikit-build-core setuptools \
	  $(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja),,ninja)
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation \
	  -C wheel.cmake=false -C editable.mode=inplace -e '.[$(EXTRAS)]'
	@touch $@

# --- native libraries
CUDA_CHOICE := build/cuda-$(ELASTICEP_CUDA).stamp
$(CUDA_CHOICE):
	@rm -f build/cuda-*.stamp elasticep/_lib/libelasticep_cuda.so
	@mkdir -p build
	@touch $@

$(BUILD)/build.ninja: $(DEPS) $(CUDA_CHOICE) CMakeLists.txt
	$(CMAKE) -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(NINJA)) \
	  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/elasticep/_lib \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY) -DELASTICEP_CUDA=$(ELASTICEP_CUDA)
	@touch $@

# The linker replaces a library rather than writing into it, so running processes keep the old one.
native: $(BUILD)/build.ninja
	@flock build/native.lock $(CMAKE) --build $(BUILD) --parallel $(JOBS)

# The part for CPUs, a fifth of what there is to compile: whoever tries the demo waits for no more.
native-cpu: $(BUILD)/build.ninja
	@flock build/native.lock $(CMAKE) --build $(BUILD) --parallel $(JOBS) \
	  --target elasticep_core elasticep_ops

# --- use
demo: native-cpu
	$(VENV)/bin/elasticep demo --ranks 4 --nodes 2 --kill worker

# AGAIN=1: tests that failed (pytest's status 1, nothing else) run once more, one at a time, and count
# by that. For a machine on which others run too: most tests are about processes in real time.
# MAKEFLAGS names descriptors that tests which build something do not have.
PYTEST := MAKEFLAGS= $(PY) -m pytest
TESTS := $(PYTEST) -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
FAILED := $(PYTEST) --last-failed --last-failed-no-failures none
ifdef AGAIN
OR_AGAIN := || { test $$? -eq 1 && echo "Once more, what failed:" && $(FAILED) $(PYTEST_ARGS); }
endif
test: build lint
	$(TESTS) -m "not long" $(PYTEST_ARGS) $(OR_AGAIN)

# Thousands of schedules and instances, and the longest runs of the demo.
test-long: build
	$(TESTS) -m long $(PYTEST_ARGS) $(OR_AGAIN)

# Both in one run: `make -j2 test-all` checks types while it compiles.
test-all: build lint
	$(TESTS) $(PYTEST_ARGS) $(OR_AGAIN)

lint: $(DEPS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(DEPS)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

proto: $(DEPS)
	$(PY) scripts/generate_protos.py

# The models of a step and of the lead, and every planted bug (docs/model); needs spin.
model:
	bash docs/model/check.sh

# On a machine with a GPU, with the interpreter that is there (torch with CUDA, nvcc, cmake, ninja,
# pytest) and nothing installed: GPU_PYTHON=python3.12 make test-gpu
GPU_PYTHON ?= $(PYTHON)
gpu-build:
	cmake -S . -B build/gpu -G Ninja -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/elasticep/_lib \
	  -DPython_EXECUTABLE=$(abspath $(shell command -v $(GPU_PYTHON))) -DELASTICEP_CUDA=ON \
	  -DELASTICEP_EMULATED=OFF
	cmake --build build/gpu --parallel $(JOBS)

test-gpu: gpu-build
	ELASTICEP_REQUIRE_GPU=1 $(GPU_PYTHON) -m pytest tests/gpu $(PYTEST_ARGS)

# All that the GPU data plane must show (docs/cuda.md), in calls of less than ten minutes: repeat it
# until it says that all is done. ACCEPTANCE_ARGS="--part speed"
ACCEPTANCE_OUT ?= build/acceptance
gpu-acceptance: gpu-build
	$(GPU_PYTHON) -m elasticep.bench acceptance --out $(ACCEPTANCE_OUT) $(ACCEPTANCE_ARGS)

# With the torch of .venv; a plain `pip wheel .` fetches one for the build.
wheel: $(DEPS)
	$(PY) -m pip wheel --no-deps --no-build-isolation -w dist .

# 20,000 random schedules of faults on a simulated cluster (docs/simulator.md).
sim: build
	$(VENV)/bin/elasticep sim --schedules 20000

clean:
	rm -rf build dist elasticep/_lib

distclean: clean
	rm -rf $(VENV)
