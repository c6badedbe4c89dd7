# Needs python 3.11 or newer and make; everything else is installed into .venv.

PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; \
	done)
MODEL ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help serve test lint bench

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

serve: $(STAMP) ## Serve a model: make serve MODEL=org/name ARGS="--port 9000" (no MODEL: the default)
	$(BIN)/windlass serve $(MODEL) $(ARGS)

test: $(STAMP) ## Run the tests: make test ARGS="tests/core -x"
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## Measure what each lever gives: make bench ARGS="batching --num-requests 8"
	$(BIN)/windlass bench levers $(ARGS)
	$(BIN)/windlass bench tables

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No python 3.11 or newer was found. Install one, or say make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
