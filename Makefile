# One command each: everything is set up in .venv on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_JOBS ?= 2

.PHONY: demo test prove lint docs clean

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e '.[test,verify]'
	@# Equality proofs need a CPU build of torch; where none is to be had, those tests are skipped and say so.
	-$(BIN)/python -m pip install -q torch==2.13.0
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/train_text.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(TEST_JOBS) -m 'not prove'

# The verifier goes on with what has no verdict of today's PTX: hours at first, minutes once all have one.
prove: $(STAMP)
	$(BIN)/python tests/verifier/matrix.py --age --jobs $(TEST_JOBS)
	$(BIN)/python tests/verifier/matrix.py
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m prove

docs: $(STAMP)
	$(BIN)/python -m pip install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist *.egg-info
