# `make demo` and `make test` install what is missing first; see `make help`.

VENV   ?= .venv
PYTHON ?= python3
DEVICE ?= auto
ARGS   ?=
JOBS   ?= 2
BIN    := $(VENV)/bin
PYTHON312 ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint test-unit gpu-kit gpu-kit-rehearsal clean distclean

help:
	@echo "make demo [ARGS=...]  the main job: a YOCO model served with and without prefill truncation"
	@echo "make test             lint, type checks and every test (GPU tests skip without a GPU)"
	@echo "make test-unit        the tests that need no engine"
	@echo "make lint             lint and type checks"
	@echo "make gpu-kit          build/gpu-kit: a check for a GPU machine without a network (docs/gpu.md)"
	@echo "make gpu-kit-rehearsal  the same without a GPU; downloads several GB once"
	@echo "make setup            only install (into $(VENV))"
	@echo "make clean            remove build outputs and caches;  make distclean: $(VENV) too"
	@echo "DEVICE=cpu|cuda       the build of vLLM; by default what the machine has"
	@echo "PYTHON=python3.12     the interpreter to start from; by default python3"
	@echo "JOBS=2                tests at a time; with engines each takes a core and up to 6 GB"

# Every time: the script knows by itself, in well under a second, whether anything is to be done.
setup:
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --device $(DEVICE)

demo: setup
	@$(BIN)/vllm-yoco demo $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# One process a suite: the engine tests set vLLM's environment, which the others must not inherit.
test: lint test-unit
	$(BIN)/pytest tests/engine --numprocesses $(JOBS) --dist loadfile
	$(BIN)/pytest tests/gpu

test-unit: setup
	$(BIN)/pytest tests/unit --numprocesses $(JOBS)

gpu-kit: setup
	$(BIN)/python -m gpu_kit.build

gpu-kit-rehearsal: gpu-kit
	$(BIN)/python -m gpu_kit.rehearse --python "$(PYTHON312)"

clean:
	rm -rf build dist *.egg-info packaging/*/build packaging/*/*.egg-info
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
