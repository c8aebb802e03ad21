# Every target does the set-up it needs; the first one on a machine downloads about 3.5 GB.
# VENV=dir puts the environment elsewhere; DEVICE=cpu|gpu|auto says which one (tools/setup_environment.sh).

VENV ?= .venv
DEVICE ?= auto
export VENV
unexport PYTHONDONTWRITEBYTECODE  # else every process compiles what it imports again
bin := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup quickstart check lint unit test test-all test-gpu parity docs format clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## make the Python environment, or bring it up to date
	@bash tools/setup_environment.sh $(DEVICE)

quickstart: ## train a tiny model on two CPU cores; key=value changes the configuration
	@bash examples/run_a3po_tiny_cpu.sh $(filter-out VENV=% DEVICE=%,$(MAKEOVERRIDES))

check: setup ## lint and unit tests, side by side: what to run before a commit
	@$(MAKE) --no-print-directory -j2 lint unit

lint: setup ## formatting, ruff, types and import directions
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/lint-imports
	$(bin)/mypy

unit: setup ## tests of single parts, in parallel
	OMP_NUM_THREADS=1 $(bin)/pytest -n logical --maxprocesses 4 --dist loadfile tests/unit

# One after the other: four ranks that wait for each other keep two cores busy, and eight take longer than twice four.
test: check ## all that CI runs: check, then several ranks and whole runs; gpu tests skip themselves without a GPU
	$(bin)/pytest -m "not nightly" tests/distributed tests/e2e tests/gpu

test-all: check ## for nights: also every layout, every place to be killed at, and long faults
	$(bin)/pytest tests/distributed tests/e2e tests/gpu

parity: setup ## every model in every layout against Hugging Face; writes docs/parity.md
	OMP_NUM_THREADS=1 $(bin)/python -m tests.distributed.parity_table

docs: ## build the pages of docs/, with search, into site/; needs Python 3.11 or newer and no other set-up
	@bash tools/build_docs.sh

test-gpu: ## the tests that need NVIDIA GPUs, in the GPU environment; those for more GPUs than are here skip themselves
	@bash tools/setup_environment.sh gpu
	$(bin)/pytest tests/gpu -m "gpu or multi_gpu"

format: setup ## rewrite the sources in the project's format
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

clean: ## remove the environment and all caches; models and runs stay
	[ ! -f "$(VENV)/.megatron_a3po" ] || rm -rf "$(VENV)" "$(VENV).log" "$(VENV).lock"
	rm -rf .uv .venv-docs site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
