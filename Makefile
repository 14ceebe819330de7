PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long coverage bench bench-packages chaos docs release clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create .venv with everything in it, at the versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## five methods on clients that label digits differently, no download
	$(BIN)/fedspd demo

# one thread for each of the two test processes
test test-long coverage: export OMP_NUM_THREADS = 1
# an empty value is none: a command that a test starts finds the package compiled
test test-long coverage: export PYTHONDONTWRITEBYTECODE =

test: $(INSTALLED)  ## linters, types, import contracts and the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 -m 'not long'

test-long: $(INSTALLED)  ## the tests that take minutes
	$(BIN)/pytest -n 2 -m long

coverage: $(INSTALLED)  ## line and branch coverage of make test: a table, and htmlcov/
	$(BIN)/pytest -n 2 -m 'not long' --cov --cov-report=term:skip-covered --cov-report=html

bench: $(INSTALLED)  ## how fast this machine trains: ratios, each with its target
	$(BIN)/fedspd bench

bench-packages: $(INSTALLED)  ## other simulators on the same work, each in a separate environment
	$(BIN)/python benchmarks/packages/run.py

chaos: $(INSTALLED)  ## faults on eight peers (Linux, as root); writes reliability.md's table
	PYTHONPATH=tools $(BIN)/python -m chaos

docs: $(INSTALLED)  ## write config.md and the list of methods from the code, paper.md from records
	$(BIN)/python tools/config_reference.py > docs/config.md
	$(BIN)/python tools/paper_page.py

release: $(INSTALLED)  ## build wheel and sdist into dist/, and try the wheel elsewhere
	$(BIN)/python tools/release.py

clean:  ## remove .venv and all caches; runs/ stays
	rm -rf .venv .hypothesis .mypy_cache .ruff_cache .import_linter_cache .pytest_cache \
		.coverage htmlcov build dist src/*.egg-info
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
