# SPDX-License-Identifier: Apache-2.0
#
#   make demo      speculate on a real language model
#   make test      lint, build with warnings as errors, run every test
#
# Both make .venv with the pinned requirements and this package first; the second time they need no
# network. For work on the sources:
#
#   make dev       build the extension in the tree (no install): then PYTHONPATH=.:python
#   make lint      check format and lint          make format    apply the format
#   make simt      the CUDA kernels for the CPU, with their checks: build/simt (tests/simt)
#   make mutation  take each barrier, fence and wait out of the kernels: is it noticed?
#   make stub      write dspark_ext/_C.pyi anew   make bench     time the operators
#   make static    build the device code without a cache, check its cost and its machine code
#   make clean     remove build/ and .venv        make test-cuda-pip   pip install with nvcc hidden
#
# BIN names the folder of another environment's programs (with the pinned requirements in it) to
# use instead of .venv/bin; it is used as it is, nothing is installed into it.
# DSPARK_CUDA=auto|off|pip|system and DSPARK_ARCHS are read from the environment.

SHELL := /bin/sh
PYTHON ?= python3
BIN ?= .venv/bin
CXX_FILES = find csrc tests bench -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'
PYTHON_FILES = $(wildcard _build bench dspark_ext python setup.py tests)

# The tests run in build/run: a process that they start there finds the installed package, not the
# sources of the tree.
PROGRAMS = $(if $(filter /%,$(BIN)),$(BIN),$(CURDIR)/$(BIN))

ifeq ($(BIN),.venv/bin)
  TOOLS = $(PYTHON) _build/environment.py tools
  REQUIREMENTS = $(PYTHON) _build/environment.py requirements
  ENVIRONMENT = $(PYTHON) _build/environment.py
else
  TOOLS = :
  REQUIREMENTS = :
  ENVIRONMENT = :
endif

.PHONY: help demo test dev static simt mutation lint format stub bench clean environment \
  requirements tools test-cuda-pip

help:
	@sed -n 's/^#   //p' Makefile

environment:
	@$(ENVIRONMENT)

requirements:
	@$(REQUIREMENTS)

tools:
	@$(TOOLS)

demo: environment
	@$(BIN)/dspark generate --demo

# The requirements, the package and the emulated kernels are made at once: no core waits while pip
# unpacks or while the last source of a build is compiled. Then one process a core with one OpenMP
# thread each: threads that wait for each other by spinning make a busy machine several times
# slower. Tests of threading say how many they want.
TEST_JOBS ?= auto

test: export DSPARK_WERROR = ON
test: export OMP_NUM_THREADS = 1
test: export DSPARK_SIMT = $(CURDIR)/build/simt/libdspark_simt.so
test: tools
	@$(MAKE) --no-print-directory -j 2 environment simt
	@$(MAKE) --no-print-directory lint
	@mkdir -p build/run && cd build/run && "$(PROGRAMS)/pytest" -q -n $(TEST_JOBS) --dist loadscope \
	  --no-loadscope-reorder \
	  -c "$(CURDIR)/pyproject.toml" \
	  "$(CURDIR)/tests" "$(CURDIR)/docs" "$(CURDIR)/README.md" --doctest-glob='*.md' \
	  --doctest-modules --pyargs dspark_ext dspark

test-cuda-pip: environment
	@mkdir -p build/run && cd build/run && DSPARK_TEST_CUDA_PIP=1 "$(PROGRAMS)/pytest" -q \
	  -c "$(CURDIR)/pyproject.toml" "$(CURDIR)/tests/packaging/test_cuda_pip.py"

dev: requirements
	@mkdir -p build/logs
	@PATH="$(CURDIR)/.venv/bin:$$PATH" && export PATH && \
	python=$$($(BIN)/python -c 'import sys; print(sys.executable)') && \
	{ cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DDSPARK_INPLACE=ON \
	  -DDSPARK_WERROR=ON -DDSPARK_CUDA=$${DSPARK_CUDA:-off} -DPython_EXECUTABLE="$$python" \
	  > build/logs/dev.log || { cat build/logs/dev.log; exit 1; }; } && \
	cmake --build build/dev --parallel 2 -- --quiet

static: requirements
	@PATH="$(CURDIR)/.venv/bin:$$PATH" && export PATH && \
	$(BIN)/python tests/static/build.py build/static && \
	DSPARK_STATIC_BUILD="$(CURDIR)/build/static" PYTHONPATH=. $(BIN)/pytest -q tests/static

simt: tools
	@mkdir -p build/logs
	@PATH="$(CURDIR)/.venv/bin:$$PATH" && export PATH && \
	{ cmake -S tests/simt -B build/simt -G Ninja > build/logs/simt.log || \
	  { cat build/logs/simt.log; exit 1; }; } && \
	cmake --build build/simt --parallel 2 -- --quiet

mutation: simt
	@OMP_NUM_THREADS=1 $(BIN)/python tests/simt/mutation.py

lint: requirements
	@$(BIN)/ruff check --quiet $(PYTHON_FILES)
	@$(BIN)/ruff format --check --quiet $(PYTHON_FILES)
	@$(CXX_FILES) | $(BIN)/python -c 'import subprocess, sys; \
	  files = sys.stdin.read().splitlines(); \
	  sys.exit(subprocess.run([sys.argv[1], "--dry-run", "-Werror", *files]).returncode)' \
	  $(BIN)/clang-format

format: requirements
	@$(BIN)/ruff check --quiet --fix $(PYTHON_FILES) || true
	@$(BIN)/ruff format --quiet $(PYTHON_FILES)
	@$(CXX_FILES) | xargs $(BIN)/clang-format -i

stub:
	@$(BIN)/python _build/stub.py --write

bench: environment
	@mkdir -p build/run && cd build/run && "$(PROGRAMS)/python" -m dspark_ext bench

clean:
	rm -rf build .venv dspark.egg-info dspark_ext/_C.*.so
