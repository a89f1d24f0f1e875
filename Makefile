# make demo   set up, fetch SmolLM2 and show it answering plainly and speculatively
# make test   set up and run every check; make test-full adds the long ones
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*)

.PHONY: demo test test-full check build lint clean

demo: $(STAMP)
	$(BIN)/python -m slipstream.cli.demo

test: $(STAMP)
	$(BIN)/python tests/run.py

test-full: $(STAMP)
	$(BIN)/pip install --quiet --editable '.[dev,reference]'
	$(BIN)/python tests/run.py --full

check: lint
lint: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

build: $(STAMP)

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf build $(VENV) .mypy_cache .pytest_cache .ruff_cache
