# Every command of this repository. `make help` lists them.

VENV ?= .venv
BIN := $(VENV)/bin
# Python of the machine with the GPU: its own, which already has JAX with CUDA.
# gpu-check and gpu-bench need jax, numpy, flax, safetensors and pytest, no network.
GPU_PYTHON ?= python3
# Seconds after which a GPU run is ended: a kernel that waits for ever never returns.
GPU_TIMEOUT ?= 540
# Folder of the report of gpu-check, and the commit to name in it where there is no git.
GPU_REPORT ?= benchmarks/results
COMMIT ?=
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=

# Set up again only when the content of pyproject.toml changes, not its date.
STAMP := $(VENV)/.installed-$(firstword $(shell cksum < pyproject.toml))

PURE := not slow and not interpret and not gpu
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest --timeout=600 $(PYTEST_ARGS)
# Only files that hold GPU tests are imported there: the others may need hypothesis.
GPU_TESTS = $(shell grep -rlE 'mark\.gpu\b' --include='test_*.py' tests)

.DEFAULT_GOAL := help
.PHONY: help demo quick check lint gpu-check gpu-bench clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## generate text with a small real model, and show the program it ran
	$(BIN)/python -m mkdsl demo

# XLA's optimizations cost a third of the time there, and gain nothing.
quick: lint ## style, types and pure tests: under a minute
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -n $(PYTEST_WORKERS) -m "$(PURE)"

check: lint ## everything that needs no GPU; sets up its own environment
	$(PYTEST) -n $(PYTEST_WORKERS) -m "not gpu"

lint: $(STAMP) ## style and types alone
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Warnings are no errors here: the packages of that machine are not pinned by us.
gpu-check: ## tests that need a GPU, with the system's Python (GPU_PYTHON=)
	@test -n "$(GPU_TESTS)" || { echo "no test is marked gpu"; exit 1; }
	MKDSL_GPU_REPORT=$(GPU_REPORT) MKDSL_COMMIT=$(COMMIT) PYTHONPATH=. \
	    timeout $(GPU_TIMEOUT) $(GPU_PYTHON) -m pytest -W default -m gpu \
	    $(PYTEST_ARGS) $(GPU_TESTS)

gpu-bench: ## decode benchmark, writes benchmarks/results/ (BENCH_ARGS=)
	PYTHONPATH=. timeout $(GPU_TIMEOUT) $(GPU_PYTHON) -m benchmarks.bench_decode $(BENCH_ARGS)

clean: ## remove the environment and every cache
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The first that works: uv, python3.12, python3 if it is new enough, one under pyenv.
$(STAMP): pyproject.toml
	@set -eu; \
	spec='.[demo,dev]'; new='import sys; sys.exit(sys.version_info < (3, 12))'; \
	rm -f $(VENV)/.installed-*; \
	if command -v uv >/dev/null 2>&1 \
	    && uv venv --quiet --allow-existing --python 3.12 $(VENV); then \
	    echo "setting up $(VENV) with uv"; \
	    uv pip install --quiet --python $(BIN)/python -e "$$spec"; \
	else \
	    for python in python3.12 python3 \
	        "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python3; do \
	        "$$python" -c "$$new" >/dev/null 2>&1 || continue; \
	        echo "setting up $(VENV) with $$python"; \
	        "$$python" -m venv $(VENV) && break; \
	    done; \
	    test -x $(BIN)/python || { \
	        echo "Python 3.12 or newer is needed to set up $(VENV)," \
	             "and neither uv, python3.12, python3 nor pyenv has one that can make" \
	             "a virtual environment. Install one of them, for example:" \
	             "'pyenv install 3.12', or the packages python3.12 and python3.12-venv." >&2; \
	        exit 1; }; \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -e "$$spec"; \
	fi; \
	touch $@
