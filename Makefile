# Two commands do everything on a fresh machine: `make run` trains a model, `make test` checks the project.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test setup setup-dev lint types unit exhaustive clean

run: setup
	$(BIN)/lowbit pretrain preset=$$($(BIN)/lowbit doctor --preset) $(ARGS)
	@echo "(source $(BIN)/activate puts lowbit on your path)"

test: setup-dev lint types unit

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[plot]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

unit:
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

exhaustive: setup-dev
	$(BIN)/python -m pytest -n 2 -m exhaustive $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
