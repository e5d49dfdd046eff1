# Each target makes the virtual environment that it needs and installs into it once; again only when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
ORACLE_BIN := .venv-oracle/bin
# What must hold for the programs that users run: the same answer, with all of XLA's optimisations.
EXACTNESS := $(addprefix tests/decode/test_,equality.py exactness.py lossless.py batch.py int8.py drafters.py)
PIP_FLAGS := --disable-pip-version-check

.PHONY: help demo test test-all oracle lint bench soak clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help: ## lists the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile

demo: .venv/installed-base ## generates with the shipped pair, and beside it without a drafter
	$(BIN)/tilewright generate --compare --dtype bfloat16

test: .venv/installed-test ## runs the tests (no torch), but for those marked slow, without checks of annotations
	TILEWRIGHT_UNCHECKED=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

test-all: .venv/installed-test .venv/installed-tpu ## runs every test, compilations for TPUs too; those of exactness with optimised programs
	$(BIN)/python -m pytest -n auto --dist loadfile --optimised $(EXACTNESS)
	$(BIN)/python -m pytest -n auto --dist loadfile $(addprefix --ignore=,$(EXACTNESS))

lint: .venv/installed-lint ## ruff and pyright
	$(BIN)/ruff check src tests benchmarks examples hatch_build.py
	$(BIN)/ruff format --check src tests examples hatch_build.py
	$(BIN)/pyright

bench: .venv/installed-base ## measures the shipped drafters against plain decoding
	$(BIN)/tilewright bench speculative --dtype bfloat16 --drafter dflash dflash2 eagle3 ngram auto

soak: .venv/installed-serve ## ten minutes of mixed load on a server, which must not leak, slow down, differ or break
	mkdir -p build
	$(BIN)/python benchmarks/soak.py --minutes 10 --json build/soak.json

oracle: .venv-oracle/installed ## compares with transformers, live; installs torch into an environment of its own
	$(ORACLE_BIN)/python -m pytest tests/oracle -W default
	$(ORACLE_BIN)/python tests/oracle/bench_generate.py
	$(ORACLE_BIN)/python tests/oracle/bench_generate.py --random qwen3-0.6b --dtype bfloat16 --also int8 --batches 1 \
		--new-tokens 16 --repetitions 3
	$(ORACLE_BIN)/python tests/oracle/bench_linear.py --layers q gate_up --rows 1 16 512 --repetitions 3
	$(ORACLE_BIN)/python -W ignore tests/oracle/bench_graph.py
	$(ORACLE_BIN)/python -W ignore tests/oracle/bench_train.py --layers 2 --batch 2 --length 256 --repetitions 3

clean: ## removes both environments and all caches
	rm -rf .venv .venv-oracle build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv-oracle/bin/python:
	$(PYTHON) -m venv .venv-oracle

# The interpreter is order-only: its timestamp is that of the system's own. The CPU kernels are left to the doctor, which
# builds them against the JAX that has just come: pip would install a second jaxlib to build them.
.venv/installed-base: pyproject.toml | .venv/bin/python
	TILEWRIGHT_NO_NATIVE=1 $(BIN)/python -m pip install $(PIP_FLAGS) -e .
	$(BIN)/tilewright doctor
	touch $@

.venv/installed-%: pyproject.toml | .venv/installed-base
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[$*]'
	touch $@

# torch goes first and alone, so that nothing else has a say in which build of it is taken.
.venv-oracle/installed: pyproject.toml | .venv-oracle/bin/python
	$(ORACLE_BIN)/python -m pip install $(PIP_FLAGS) torch==2.13.0
	TILEWRIGHT_NO_NATIVE=1 $(ORACLE_BIN)/python -m pip install $(PIP_FLAGS) -e '.[oracle,test]'
	touch $@
