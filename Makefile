# Two commands do everything on a fresh machine: `make run` trains a model, `make test` checks the project.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Packages are compiled when they are first imported, not at installation: a minute less. Where the environment forbids
# writing that down (common in containers), every start would compile them again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: run test setup setup-dev lint types unit exhaustive golden clean

run: setup
	$(BIN)/lowbit pretrain preset=$$($(BIN)/lowbit doctor --preset) $(ARGS)
	@echo "(source $(BIN)/activate puts lowbit on your path)"

test: setup-dev lint
	$(MAKE) --no-print-directory -j 2 types unit

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[plot]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
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

# Golden values anew from the package of four over six's authors, which is built without its CUDA kernels and kept apart.
golden: setup-dev
	SKIP_CUDA_BUILD=1 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --upgrade \
		--target build/golden fouroversix==1.0.5
	PYTHONPATH=build/golden $(BIN)/python tests/quant/write_golden_four_over_six.py
	git diff --exit-code --stat -- tests/quant/golden_four_over_six.json

clean:
	rm -rf $(VENV) build *.egg-info
