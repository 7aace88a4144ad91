# The three commands of the project. Everything happens in .venv, which is made on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TARGET ?= pocket_qwen2_5_vl
RUN ?= runs/demo_$(TARGET)

.PHONY: demo test lint clean

# torch comes first and pinned: any other way may fetch several GB of CUDA packages on a CPU machine.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/sage-train experiment=demo target=$(TARGET) run.dir=$(RUN)

test: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
