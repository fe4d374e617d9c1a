# Everything by one command each; the environment is made when it is missing.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: help setup train test slow test-all check benchmark

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/installed  ## make .venv and install everything at the versions of constraints.txt (PYTHON=python3.11)

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: setup  ## train the default experiment (ARGS="experiment=digits_mlp optimizer.lr=1e-3")
	@$(BIN)/python train.py $(ARGS)
	@echo "to go on in this shell: source .venv/bin/activate"

test: check  ## check, and run the tests, all but the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(ARGS)

slow: setup  ## run the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

test-all: test slow  ## run all tests

check: setup  ## lint and types; prints the longest functions and files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.longest

benchmark: setup  ## print the measured ratios of benchmarks/
	$(BIN)/python -m benchmarks.loop
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.sweep
