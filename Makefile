# Every target does its own set-up: `make demo` and `make test` work on a fresh Linux machine with
# Python 3.11 or newer, git, make and g++. Another Python: `make test PYTHON=python3.12`.
# Another torch, in an environment of its own: `make test TORCH=2.11.0`, the oldest that fxpipe promises.

PYTHON ?= python3
ARGS ?=

PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
VENV := $(if $(filter $(PINNED),$(TORCH)),.venv,.venv-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# pip would compile all files, of which a quarter are ever imported. Python compiles those, once: what it has compiled,
# it keeps for the next process.
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast test-all kernels bytecode lint site gpu-check coverage matrix wheel-check env clean distclean

help:
	@echo "make demo       compile a small GPT-2 into 4 rank programs and train it here; see build/demo/"
	@echo "make test       run the tests            (make test ARGS='-k text' runs some of them,"
	@echo "                                          make test TORCH=2.11.0 all of them under another torch)"
	@echo "make test-fast  run those that are not slow (less than a minute)"
	@echo "make test-all   run those of make test, with more settings"
	@echo "make lint       check style, types and walls  (ruff, mypy, import-linter)"
	@echo "make site       build the documentation as a site: build/site/index.html"
	@echo "make gpu-check  try fxpipe on the GPUs of this machine (fifteen minutes); docs/gpus.md"
	@echo "make coverage   compile some hundreds of models that others wrote, compare with eager (hours); docs/coverage.md"
	@echo "                (make coverage ARGS='--only llama --options auto' tries some of them)"
	@echo "make matrix     try other versions of Python and torch, each in an environment of its own"
	@echo "make wheel-check  build a wheel and an sdist, and run the sdist's fast tests with the wheel (five minutes)"
	@echo "make env        only make .venv and install into it"
	@echo "make clean      remove what was built; make distclean removes .venv as well"

demo: env
	$(BIN)/python examples/demo.py $(ARGS)

# A worker runs whole files, in the order of tests/conftest.py: what a file compiles for several of its tests,
# it compiles once.  Five workers for two cores: tests of several ranks wait.
PYTEST := $(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder

# What takes longest is listed at the end, so that it stays known where the time of CI goes.
test: env
	$(PYTEST) --durations=30 --durations-min=2 $(ARGS)

# With more settings of what the others show.
test-all: env
	$(PYTEST) -m 'not gpu' $(ARGS)

# Few of them wait: a worker for each core.
test-fast: env
	$(PYTEST) -n auto --fast $(ARGS)

# The inner loops of the schedule search, which numba compiles and caches: in one process, before several
# processes need the same ones. With a memory limit and uneven times the search runs nearly all of them.
kernels: env
	$(BIN)/python -m fxpipe simulate --schedule auto --ranks 3 --microbatches 7 --memory-limit 2.5 \
	    --forward 1 --backward-input 1.5 --backward-weight 0.7 --effort 0.1 >/dev/null

# Python's code of the package and of the tests, as pytest rewrites these: each worker would make its own.
bytecode: env
	$(BIN)/python -m pytest --collect-only --quiet >/dev/null

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Links that lead nowhere are errors, but with --quiet, which hides them. The variable silences an advertisement.
site: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# On a machine with GPUs: does it work, and well?
gpu-check: env
	$(BIN)/python benchmarks/gpu_check.py --output benchmarks/results/gpu_check.txt $(ARGS)

# An environment of its own, with the libraries whose models are tried.
COVERAGE := .venv-coverage
coverage: $(COVERAGE)/.installed
	OMP_NUM_THREADS=1 $(COVERAGE)/bin/python -m benchmarks.model_coverage $(ARGS)

$(COVERAGE)/.installed: pyproject.toml constraints.txt benchmarks/model_coverage/requirements.txt
	$(PYTHON) -m venv $(COVERAGE)
	$(COVERAGE)/bin/$(PIP_INSTALL) -c constraints.txt pip
	$(COVERAGE)/bin/$(PIP_INSTALL) -c constraints.txt torch==$(PINNED)
	$(COVERAGE)/bin/$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	$(COVERAGE)/bin/$(PIP_INSTALL) --no-deps -r benchmarks/model_coverage/requirements.txt
	@touch $@

# Those that are not to be had are told: make matrix ARGS='--python python3.12 --torch newest --tests'
matrix:
	$(PYTHON) scripts/matrix.py $(ARGS)

# What is released, as a user has it: the fast tests of the sdist with the wheel, in a new environment.
wheel-check:
	$(PYTHON) scripts/matrix.py --python $(PYTHON) --torch $(PINNED) --tests $(ARGS)

env: $(INSTALLED)

# First a pip of our own, as that of Python 3.11 takes twice as long; then torch alone, by its exact version:
# constraints.txt says why.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "fxpipe needs Python 3.11 or newer, and '$(PYTHON)' is not that" \
	         "($$($(PYTHON) --version 2>&1)). Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@# Debian packages venv apart from Python.
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || scripts/apt_install.sh \
	    $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])') || true
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/$(PIP_INSTALL) -c $(VENV)/constraints.txt pip
	$(BIN)/$(PIP_INSTALL) -c $(VENV)/constraints.txt torch==$(TORCH)
	$(BIN)/$(PIP_INSTALL) -c $(VENV)/constraints.txt -e '.[dev]'
	@command -v g++ >/dev/null || scripts/apt_install.sh g++ || \
	    echo "There is no C++ compiler, which backend=\"inductor\" and a test need: apt-get install g++"
	@command -v dot >/dev/null || scripts/apt_install.sh graphviz || \
	    echo "Graph drawings will be written as .dot only. For pictures: apt-get install graphviz"
	@touch $@

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fxpipe tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
