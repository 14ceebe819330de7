PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long bench docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create .venv with everything in it, at the versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## FedSPD against training alone, on digits that need no download
	$(BIN)/fedspd demo

# one thread for each of the two test processes
test test-long: export OMP_NUM_THREADS = 1

test: $(INSTALLED)  ## linters, types, import contracts and the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 -m 'not long'

test-long: $(INSTALLED)  ## the tests that take minutes
	$(BIN)/pytest -n 2 -m long

bench: $(INSTALLED)  ## examples per second of local training, against a plain torch loop
	$(BIN)/python benchmarks/training.py

docs: $(INSTALLED)  ## write docs/config.md anew from the code
	$(BIN)/python tools/config_reference.py > docs/config.md

clean:  ## remove .venv and all caches; runs/ stays
	rm -rf .venv .hypothesis .mypy_cache .ruff_cache .import_linter_cache .pytest_cache build dist src/*.egg-info
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
