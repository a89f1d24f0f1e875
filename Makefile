# make demo   set up, fetch SmolLM2 and show it answering plainly and speculatively
# make test   set up and run every check; make test-full adds the long ones
# make picture   draw docs/demo.svg from the demo's output
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
    $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SOURCES := pyproject.toml CMakeLists.txt src/slipstream/kernels/native.py $(wildcard csrc/*)

.PHONY: demo test test-full picture check build lint clean

demo: $(STAMP)
	$(BIN)/python -m slipstream.cli.demo

test: $(STAMP)
	$(BIN)/python tests/run.py

test-full: $(STAMP)
	$(BIN)/pip install --quiet --editable '.[dev,reference]'
	$(BIN)/python tests/run.py --full

picture: $(STAMP)
	$(BIN)/python docs/make_picture.py

check: lint
lint: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

build: $(STAMP)

$(STAMP): $(SOURCES)
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one: make PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Fetching what is needed and compiling the kernels, one to five minutes ..."
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf build $(VENV) .mypy_cache .pytest_cache .ruff_cache
