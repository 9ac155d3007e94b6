# The commands of the project; `make` alone lists them. Everything installs itself into .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := build/clients
ROOTS := server moe dist config

.DEFAULT_GOAL := help
.PHONY: help run test test-slow lint format typecheck build bench bench-recovery gpu-check clean links

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch goes first and alone: its pin decides which build is taken, before anything else asks for "torch".
$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard moe/native/*.h moe/native/*.cpp dist/host/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "moed needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

links:
	@mkdir -p .links/moed && for d in $(ROOTS); do ln -sfn ../../$$d .links/moed/$$d; done

run: $(VENV)/.installed  ## serve the bundled model over two DP ranks on http://127.0.0.1:8000 (ARGS="--port 9000" for more)
	@exec $(BIN)/moed serve --data-parallel-size 2 $(ARGS)

test: $(VENV)/.installed  ## run the tests (ARGS="-k scheduler" for some of them)
	@$(BIN)/pytest -m "not slow" $(ARGS)

# Clients of others, for the slow tests; where they cannot be installed their tests skip and say so.
$(CLIENTS)/.installed: tests/e2e/clients/requirements.txt
	@mkdir -p $(CLIENTS) && $(PYTHON) -m venv $(CLIENTS) && \
	  $(CLIENTS)/bin/pip install -q --disable-pip-version-check --no-deps -r $< > $(CLIENTS)/install.log 2>&1 \
	  && touch $@ || echo "clients for the slow tests could not be installed: see $(CLIENTS)/install.log"

test-slow: $(VENV)/.installed $(CLIENTS)/.installed  ## run the long tests: faults at scale, wide matrices, soak
	@$(BIN)/pytest -m slow --timeout 3600 $(ARGS)

lint: $(VENV)/.installed  ## ruff: errors and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.installed  ## ruff: rewrite
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

typecheck: $(VENV)/.installed links  ## mypy, strict
	@$(BIN)/mypy

build: $(VENV)/.installed  ## wheel and sdist, into build/wheels (dist/ holds source code here)
	@$(BIN)/python -m build -o build/wheels .

bench: $(VENV)/.installed  ## table of speeds, in turns with PEER=/path/to/vllm if given (ARGS="--only 'DP 2' --history")
	@$(BIN)/python -m tests.benchmarks.table $(if $(PEER),--peer '$(PEER)') $(ARGS)

bench-recovery: $(VENV)/.installed  ## faults under load: what they cost open requests, seconds until all go on (ARGS="--repeats 5")
	@$(BIN)/python -m tests.benchmarks.recovery $(ARGS)

gpu-check: $(VENV)/.installed  ## all that needs a GPU, within 8 minutes: kernels, models, speed, graphs (exit code 2: no GPU)
	@$(BIN)/python -m tests.gpu.check $(ARGS)

clean:  ## remove what the commands above made (never the source folder dist/)
	@rm -rf build .links $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	@find $(ROOTS) tests -name __pycache__ -type d -prune -exec rm -rf {} +
