# Every task that people and CI run. `make` alone lists them.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed
TIER ?= not slow
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all fmt lint types proto bench bench-quick matrix clean

help: ## List the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## Build .venv (with psctl in it) from requirements.lock

# Exact versions come from the lock file; the project itself is installed in place, without asking for anything more.
$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; try make $(MAKECMDGOALS) PYTHON=python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

run: setup ## Train the digits example on 1 coordinator, 2 servers and 2 workers
	@$(BIN)/psctl local --servers 2 --workers 2 examples/digits.py $(ARGS)

test: setup ## All tests but the slow ones
	@$(BIN)/python -m pytest -m "$(TIER)" $(ARGS)

test-all: setup ## All tests
	@$(BIN)/python -m pytest $(ARGS)

fmt: setup ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lint: setup ## Format, style and import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports

types: setup ## mypy, strict
	@$(BIN)/mypy

matrix: setup ## Run the numerics tests, print what equals plain PyTorch, and write tests/numerics/MATRIX.md
	@$(BIN)/python -m tests.numerics --write $(ARGS)

proto: setup ## Generate ps/v1 from proto/
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/ps/v1/*.proto

bench: setup ## Every benchmark, ratios against baselines (shaped links need root)
	@$(BIN)/python benchmarks/run_all.py $(ARGS)

bench-quick: setup ## The same, a few minutes, loopback only
	@$(BIN)/python benchmarks/run_all.py --quick $(ARGS)

clean: ## Remove .venv, caches and run folders
	rm -rf .venv runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
