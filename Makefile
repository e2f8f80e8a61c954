# make demo: from a fresh clone to a report. make test: everything that CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
DEMO_TOKENS ?= 50k

.DEFAULT_GOAL := help
.PHONY: help demo test suite lint browser bench clean
# Of `test`: the browser comes while pip works, types are checked while tests run.
MAKEFLAGS += --jobs=2

help:
	@echo "make demo   install into .venv, probe the shipped pair, leave a report to open"
	@echo "make test   install what tests need, run lint, types and the whole suite"
	@echo "make lint   ruff and mypy only"
	@echo "make bench  the measured ratios of docs/benchmarks.md"

demo: $(VENV)/.installed
	@mkdir -p $(RUNS)
	$(BIN)/probe batch --ckpt smelt-tiny --tokens $(DEMO_TOKENS) --force --out $(RUNS)/smelt-tiny.h5
	$(BIN)/probe batch --ckpt baseline-tiny --tokens $(DEMO_TOKENS) --force -q --out $(RUNS)/baseline-tiny.h5
	$(BIN)/probe dyck --ckpt smelt-tiny --items 20 --shots 0,1,2 --seeds 2 --nested 16 --force --out $(RUNS)/dyck.h5
	$(BIN)/probe report $(RUNS)/smelt-tiny.h5 $(RUNS)/baseline-tiny.h5 $(RUNS)/dyck.h5 --force \
	    --out $(RUNS)/report.html
	@echo "Open $(RUNS)/report.html, or run: $(BIN)/probe view $(RUNS)/smelt-tiny.h5 $(RUNS)/baseline-tiny.h5 $(RUNS)/dyck.h5"

test: lint suite

suite: $(VENV)/.installed-test browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --durations 20

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test browser
	$(BIN)/python benchmarks/probes.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/pages.py
	$(BIN)/python benchmarks/dyck.py

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

$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
