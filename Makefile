# Every target makes .venv when it has to. Another interpreter: PYTHON=python3.12 make test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALL := -c constraints.txt -e '.[dev]'
unexport PYTHONDONTWRITEBYTECODE  # many tests start Python: modules are compiled once

# A PYTHON that was asked for and did not make .venv makes it anew; unasked, any .venv will do.
ifeq ($(origin PYTHON),file)
MADE := $(VENV)/.made
else
MADE := $(VENV)/.made-with-$(subst /,-,$(PYTHON))
endif

.DEFAULT_GOAL := help
.PHONY: help demo benchmark test test-all test-of lint types format docs tutorials pictures site dist wheel-test guards clean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED) ## run the demonstration, on data that come with it
	@echo "==> nullbayes demo"
	@$(BIN)/nullbayes demo

benchmark: $(INSTALLED) ## run the benchmarks, small; others: make benchmark ARGS="--size full --data FOLDER"
	@echo "==> python -m benchmarks $(ARGS)"
	@$(BIN)/python -m benchmarks $(ARGS)

test: $(INSTALLED) ## run the tests and the doctests, without the slow ones
	@echo "==> tests and doctests (the slow ones: make test-all)"
	@$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"

test-all: $(INSTALLED) ## run all of them
	@echo "==> all tests and doctests"
	@$(BIN)/python -m pytest -q -n auto --dist worksteal

test-of: $(INSTALLED) ## run the tests that guard one module: make test-of MODULE=jacobian/rows
	@echo "==> tests of $(MODULE)"
	@$(BIN)/python -m pytest -q -m "not slow" $$(PYTHONPATH=tests $(BIN)/python -m support.guards $(MODULE))

lint: $(INSTALLED) ## check style and formatting
	@echo "==> ruff check, ruff format --check"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || \
		{ echo "Files are not formatted: make format"; $(BIN)/ruff format --check .; exit 1; }

types: $(INSTALLED) ## check the types of the library
	@echo "==> mypy"
	@$(BIN)/mypy

format: $(INSTALLED) ## format the code, and repair what can be repaired by rule
	@echo "==> ruff check --fix, ruff format"
	@$(BIN)/ruff check --quiet --fix --exit-zero .
	@$(BIN)/ruff format .

docs: $(INSTALLED) ## write the pages that are made from tables
	@echo "==> docs/compatibility.md, docs/architecture.md, docs/many-machines.md"
	@PYTHONPATH=tests $(BIN)/python -m support.compatibility_page
	@PYTHONPATH=tests $(BIN)/python -m support.architecture_page
	@$(BIN)/python -m benchmarks.scaling results/processes.json --write docs/many-machines.md

pictures: $(INSTALLED) ## draw the pictures of the documentation anew
	@echo "==> docs/pictures"
	@$(BIN)/python docs/pictures.py

site: $(INSTALLED) ## build the documentation into site/, without a network; a warning is an error
	@echo "==> mkdocs build"
	@# Not --quiet, which hides warnings from --strict; the variable hides a notice about the theme's successor.
	@NO_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict
	@echo "The site is in site/: open site/index.html"

dist: $(INSTALLED) ## build wheel and source distribution into dist/, and check their descriptions
	@echo "==> python -m build, twine check"
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist > build.log 2>&1 || { cat build.log; rm -f build.log; exit 1; }
	@rm -f build.log
	@$(BIN)/python -m twine check --strict dist/*

wheel-test: dist ## install wheel and source distribution into empty environments, and run README's lines there
	@echo "==> README's lines in empty environments"
	@$(BIN)/python tests/support/installed.py dist/*.whl dist/*.tar.gz

tutorials: $(INSTALLED) ## run docs/tutorials in full, and write their outputs and pictures: about two minutes
	@echo "==> docs/tutorials"
	@PYTHONPATH=tests $(BIN)/python -m support.tutorials $(ARGS)

guards: $(INSTALLED) ## measure which tests guard which module, for the table in CONTRIBUTING.md
	@echo "==> which tests guard which module"
	@PYTHONPATH=tests $(BIN)/python -m support.guards

clean: ## remove .venv, the caches and the build outputs
	@echo "==> removing $(VENV), caches and build outputs"
	@rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE):
	@echo "==> making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $(VENV)/.made $(VENV)/.made-with-$(subst /,-,$(PYTHON))

$(INSTALLED): pyproject.toml constraints.txt $(MADE)
	@echo "==> installing nullbayes and its tools into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(INSTALL) || \
		{ echo "To see more: $(BIN)/python -m pip install $(INSTALL)"; exit 1; }
	@touch $@
