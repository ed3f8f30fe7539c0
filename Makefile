# make demo   installs into .venv and compares what to do with the KV cache of agents that wait for tools
# make test   installs what tests need and runs them all; those of kernels/ skip themselves without torch
# make test-kernels   installs torch and Triton too, and runs the tests that need them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test test-kernels study lint clean

demo: $(VENV)/.installed
	$(BIN)/simcore compare experiments/coding_agents/study.yaml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto

test-kernels: $(VENV)/.installed-kernels
	$(BIN)/python -m pytest -n auto tests/kernels tests/experiments/test_live_validation.py

# The heavier checks; the kernels once with bounds checking, since an index out of range would corrupt silently.
study: $(VENV)/.installed-dev
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=out/boundscheck $(BIN)/python -m pytest -m study tests/models/test_planned_path.py
	$(BIN)/python -m pytest -m study

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	$(BIN)/python -m simcore.experiments.precompile
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@

$(VENV)/.installed-kernels: $(VENV)/.installed-dev
	$(INSTALL) --editable '.[kernels]'
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
