# One command each: `make train`, `make test`, `make test-all`, `make check`, `make bench`, `make docs`.
# The first of them makes the environment in .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TRAIN_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=
FAST_TESTS := $(wildcard $(addprefix tests/,architecture harness unit parallel parity faults golden docs clients))

.PHONY: train test test-all check bench docs

# torch comes first and alone, so that the wheel of this machine's kind is the one that everything else builds on
$(READY): pyproject.toml constraints.txt setup.py $(wildcard deepspeed/native/*.cpp deepspeed/native/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt torch
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@

train: $(READY)
	$(BIN)/deepspeed --num_gpus 2 examples/bytes_lm/train.py $(TRAIN_ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(FAST_TESTS) $(TEST_ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest $(TEST_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/architecture

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py $(BENCH_ARGS)

docs: $(READY)
	$(BIN)/ds_config reference docs/configuration.md
