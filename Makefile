# make demo: from a fresh clone to a picture. make test: everything that CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
DEMO_TOKENS ?= 200k

.DEFAULT_GOAL := help
.PHONY: help demo test lint browser bench clean

help:
	@echo "make demo   install into .venv, probe the shipped checkpoint, leave a page to open"
	@echo "make test   install what tests need, run lint, types and the whole suite"
	@echo "make lint   ruff and mypy only"
	@echo "make bench  the measured ratios of docs/benchmarks.md"

demo: $(VENV)/.installed
	@mkdir -p $(RUNS)
	$(BIN)/probe attention-sink --ckpt smelt-tiny --tokens $(DEMO_TOKENS) --force \
	    --out $(RUNS)/demo.h5 --html $(RUNS)/demo.html

test: $(VENV)/.installed-test browser lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/probes.py
	$(BIN)/python benchmarks/scaling.py

# Page tests drive a real Chromium: Debian's where apt can install it, else one that is there.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null \
	  || (command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] \
	      && apt-get update -qq && apt-get install -y -qq chromium >/dev/null) \
	  || echo "No Chromium found: install it (Debian: apt-get install chromium) to run the page tests."

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
