# make run    a broken training script, watched and diagnosed
# make test   lint, types and tests (make test-all adds the slow ones)
# make docs   the documentation as a website, in site/
# All set up everything they need; the set-up is skipped while its inputs have not changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-all docs lint clean

run: $(READY)
	@$(BIN)/gradproof run examples/broken_transformer.py

test: lint
	$(BIN)/pytest -n 2 -q -m "not slow"

test-all: lint
	$(BIN)/pytest -n 2 -q

docs: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/zensical build --clean --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) with PyTorch: minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) site .cache .pytest_cache .mypy_cache .ruff_cache
