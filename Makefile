# make demo   set up, fetch SmolLM2 and show it answering plainly and speculatively
# make test   set up and run every check; make test-full adds the long ones and those that need torch
#             (without a GPU: make test-full PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu)
# make picture   draw docs/demo.svg from the demo's output
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
    $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SOURCES := pyproject.toml CMakeLists.txt src/slipstream/kernels/native.py $(wildcard csrc/*)

.PHONY: demo test test-full picture check build lint clean

demo: $(STAMP)
	@echo "SmolLM2 (93 MB, fetched the first time) answers two prompts both ways: half a minute and the download ..."
	$(BIN)/python -m slipstream.cli.demo

test: $(STAMP)
	@echo "Style, types and about 3,900 tests, which fetch SmolLM2 (93 MB) where it is missing: three to six minutes ..."
	$(BIN)/python tests/run.py

test-full: $(STAMP)
	@echo "Fetching torch and transformers (200 MB, gigabytes where pip takes the build for CUDA): minutes ..."
	$(BIN)/pip install --quiet 'slipstream[reference]'
	@echo "Style, types and about 4,200 tests, the long ones too: about 25 minutes ..."
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
	@test -x $(BIN)/python || echo "Making an environment in $(VENV): some seconds ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Fetching pip's latest release: some seconds ..."
	$(BIN)/pip install --quiet --upgrade pip
	@echo "Fetching packages and compiling the kernels: one to five minutes without a further word ..."
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf build $(VENV) .mypy_cache .pytest_cache .ruff_cache
