PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.scute-stamp

# An engine is several processes: their threads must not spin while they wait for a core.
export OMP_NUM_THREADS ?= 2
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export VLLM_LOGGING_LEVEL ?= WARNING
export VLLM_NO_USAGE_STATS := 1

.NOTPARALLEL:
.PHONY: help venv check test-kernels test-rest test demo clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## install the locked environment into .venv (about 2 minutes, 3.6 GB)

$(STAMP): requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

check: venv ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-kernels: venv ## the Triton kernels, in Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels

test-rest: venv ## every other test, vLLM engines on the CPU included
	$(BIN)/pytest tests --ignore=tests/kernels

test: check test-kernels test-rest ## all of the above

demo: venv ## adapters of every method in one vLLM batch, held against the PEFT library
	$(BIN)/python -m scute.demo

clean: ## remove what make made: the environment, the demo's models and all caches
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
