# Every target sets up what it needs first; PYTHON chooses the base interpreter.
BIN := .venv/bin
PYTHON ?= python3
JOBS ?= 2
C_FILES = find csrc aiter_mx op_tests docs -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.hpp' -o -name '*.c' -o -name '*.cpp'

export PYTHON
.PHONY: help setup demo test test-engines test-gpu sanitize-gpu lint types unit docs format wheel clean
.NOTPARALLEL:

help:
	@echo 'make demo     real sentence embeddings and decode shapes through the MX-FP8 kernels'
	@echo 'make test     lint, types and tests'
	@echo 'make test-engines  vLLM, SGLang, torchao and transformers over this package, on a CPU'
	@echo 'make test-gpu  every test for GPUs, on an NVIDIA Hopper GPU, by PYTHON as it is'
	@echo 'make sanitize-gpu  compute-sanitizer over one case of every kernel, on such a GPU'
	@echo 'make lint     ruff, clang-format and import contracts, without changing a file'
	@echo 'make format   ruff and clang-format, in place'
	@echo 'make docs     the documentation as a site, in build/site'
	@echo 'make wheel    build dist/*.whl'
	@echo 'make clean    delete the environment and what the tools left behind'

setup:
	@.ci/setup

demo: setup
	@$(BIN)/aiter-mx demo

test: lint types unit

test-engines: setup
	@env -u PYTHON .ci/engines

# Sets nothing up: a machine with a GPU has an interpreter with torch, and often no network.
test-gpu:
	@$(PYTHON) -m op_tests.gpu --save $(GPU_OPTIONS)

# compute-sanitizer's four tools over one case of every kernel.
sanitize-gpu:
	@$(PYTHON) -m op_tests.sanitize --save $(GPU_OPTIONS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(C_FILES) | xargs -r $(BIN)/clang-format --dry-run -Werror

types: setup
	$(BIN)/mypy

# Two workers by default: one thread each keeps them from fighting over the cores. Each begins with
# a half of its own, so that tests of one file, which share what is compiled, stay together.
unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
	@$(BIN)/python -m op_tests.gpu --state

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(C_FILES) | xargs -r $(BIN)/clang-format -i

docs: setup
	$(BIN)/python -m tune.figures --check
	$(BIN)/mkdocs build --strict --quiet

wheel: setup
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
