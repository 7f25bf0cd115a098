# make run    a fault planted in a training script, found, explained, and its fix tried
# make test   lint, types and tests (make test-all adds the slow ones)
# make docs   the documentation as a website, in site/
# make dist   wheel and sdist in dist/, each proven in an empty environment
# All set up everything they need; the set-up is skipped while its inputs have not changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-all test-again docs dist lint browser clean

run: $(READY)
	@$(BIN)/gradproof demo

test: lint browser
	$(BIN)/pytest -n 2 -q -rs -m "not slow"

test-all: lint browser
	$(BIN)/pytest -n 2 -q -rs

# Of a run of the tests that ended with one to three failures: those, one after the other.
FAILED := .pytest_cache/v/cache/lastfailed
test-again: lint
	@$(BIN)/python -c "import json, sys; f = json.load(open('$(FAILED)')); print('failed once:', *f, sep='\n  '); sys.exit(len(f) > 3)"
	$(BIN)/pytest -q -rs --last-failed --last-failed-no-failures none

docs: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/zensical build --clean --strict

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt hatchling
	$(BIN)/python -m hatchling build -d dist
	for package in dist/*; do PYTHON=$(PYTHON) .ci/prove_install $$package || exit 1; done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page is tested in a real browser: Debian's chromium, installed if it can be; without one those tests skip, and say so.
browser:
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium for the tests of the page"; \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core) \
			>/dev/null || echo "chromium could not be installed: the tests of the page will skip"; \
	else echo "no chromium, and no right to install it: the tests of the page will skip"; fi

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) with PyTorch: minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) site dist .cache .pytest_cache .mypy_cache .ruff_cache
