# make demo   installs into .venv and compares what to do with the KV cache of agents that wait for tools
# make test   installs what tests need and runs them all
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test study lint clean

demo: $(VENV)/.installed
	$(BIN)/simcore compare experiments/coding_agents/study.yaml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto

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

clean:
	rm -rf $(VENV) out build *.egg-info
