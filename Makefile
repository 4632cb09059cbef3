# make demo: environment, pinned packages, then the whole pipeline on the embedded model; prints the result table.
# make check: environment, then format, lint, types and all tests. This is what CI runs.
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input
READY := $(VENV)/ready
DEMO := artifacts/demo

# One thread a process: two test workers share two cores, and torch's own threads only get in the way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Of forward passes that are compared: caches, attention, statistics, what is measured, what the tutorial prints.
MODEL_TESTS := tests/cache tests/docs/test_tutorial.py \
  $(filter-out %/test_cache_transient.py,$(wildcard tests/store/test_*.py)) \
  $(addprefix tests/models/test_,models_contract.py models_load.py models_projections.py rotary.py) \
  $(addprefix tests/run/test_recipes.py::test_a_shipped_recipe_runs_to_its_table,[best] [default] [mixkvq] [pm-kvq] [sensitivity]) \
  $(wildcard $(addprefix tests/stages/test_,evaluate*.py latents.py observers.py profile*.py)) \
  $(wildcard $(addprefix tests/systems/,*/test_*cache.py aqua_kv/test_*predict*.py basis/test_basis*.py pm_kvq/test_reparam.py)) \
  $(addprefix tests/stages/test_search.py::test_,an_interrupted_search_writes_the_same_bytes \
  the_plan_that_ships_is_the_plan_that_was_measured)

.DEFAULT_GOAL := help
.PHONY: help setup demo check format lint types test once old-cpu newest oldest ends ends-oldest ends-newest gpu engines real serve-real bench product first-user docs clean

help:
	@echo "make demo    set up, run the pipeline on the embedded model, print the table"
	@echo "make check   set up, then format, lint, types and tests (what CI runs)"
	@echo "make test    set up, then the tests alone"
	@echo "make old-cpu set up, then the tests that run models, with the arithmetic of an older CPU"
	@echo "make newest  set up, then the tests with the newest packages that pyproject.toml allows; oldest: with its floors"
	@echo "make ends    set up, then a plan, a generation and the engines' contract with both"
	@echo "make gpu     set up, then what needs a GPU"
	@echo "make engines set up, then what serves in a real engine"
	@echo "make format  rewrite the sources in the house format"
	@echo "make lint    format and lint, reading only"
	@echo "make real    measure all systems on a pretrained model (MODEL=, OPTIONS=--quick on a CPU)"
	@echo "make serve-real  serve a pretrained model in each engine, and compare its answers with generate (MODEL=, OPTIONS=)"
	@echo "make bench   measure time and memory of the stages (lab)"
	@echo "make product  time the plans that ship on a GPU (OPTIONS=\"--part layers\")"
	@echo "make first-user  install the wheel in an empty environment, and go the way of docs/first-user.md"
	@echo "make docs    build the documentation as a site, in site/; warnings are errors"
	@echo "make clean   remove caches, the demo's output and the environment"

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvcal needs Python 3.11 or newer; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1 | head -n 1). hint: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@echo "setting up $(VENV), some minutes the first time: torch" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) "$$(grep '^torch==' requirements.lock)"
	@echo "setting up $(VENV): $$(grep -c '==' requirements.lock) pinned packages" >&2
	@$(PIP) --requirement requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/kvcal run recipes/default.toml --set allocate.same_bytes_as=kivi-2 --set allocate.context=4096 \
	  --set evaluate.num_problems=4 --out $(DEMO)

check: lint types once

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

test: $(READY)
	$(PYTEST) -n 2 --dist loadfile

# Every test once: those that run models with the arithmetic of an older CPU.
OLD_CPU := MKL_ENABLE_INSTRUCTIONS=SSE4_2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
once: $(READY)
	$(PYTEST) -n 2 --dist loadfile $(addprefix --deselect=,$(MODEL_TESTS))
	$(MAKE) --no-print-directory old-cpu

# CPUs differ in the last bits of a matrix product; these settings choose kernels without AVX, so that one machine
# stands for another.
old-cpu: $(READY)
	$(OLD_CPU) $(PYTEST) -n 2 --dist loadfile $(MODEL_TESTS)

# Both ends of the ranges of pyproject.toml, in environments of their own on top of $(VENV)'s (.ci/ends.py). All releases
# of the others work with its torch; TORCH=2.15.0 installs another one, of several GB.
newest oldest: $(READY)
	python=$$(KVCAL_TORCH=$(TORCH) $(BIN)/python .ci/ends.py $@) && OMP_NUM_THREADS=1 $$python -m pytest -n 2 --dist loadfile

# Without a package index there is no environment, which is said, and no failure.
SHORT := tests/engines/test_versions.py tests/models/test_gguf.py \
  tests/cache/test_cache_generate.py::test_quantized_plans_generate_with_exact_bytes \
  tests/commands/test_plan_commands.py::test_a_plan_in_one_command
ends:
	@$(MAKE) --no-print-directory -j 2 ends-oldest ends-newest

ends-oldest ends-newest: $(READY)
	@python=$$($(BIN)/python .ci/ends.py $(@:ends-%=%)); code=$$?; \
	  if [ $$code = 69 ]; then exit 0; elif [ $$code != 0 ]; then exit $$code; fi; \
	  OMP_NUM_THREADS=1 $$python -m pytest -q -p no:cacheprovider $(SHORT)

# A worker's share of the GPU is small, its share of the host's memory is not.
gpu: $(READY)
	$(PYTEST) -m gpu -n auto --dist worksteal

# The environment of each engine is made at the first run, in a folder of caches; some minutes a version.
engines: $(READY)
	$(PYTEST) -m engines -n 2 --dist load tests/engines

# All systems on a pretrained model: make real MODEL=path/to/model.gguf OPTIONS="--data texts". On a CPU: OPTIONS=--quick.
MODEL ?= smollm2
real: $(READY)
	$(BIN)/python lab/real.py --model $(MODEL) $(OPTIONS)

# A plan, the engines' own servers, and the answers over HTTP: make serve-real MODEL=folder OPTIONS="--engines vllm". On a
# CPU some ten minutes an engine, besides the plan; the environment of each engine is made at the first run.
serve-real: $(READY)
	$(BIN)/python lab/serve_real.py --model $(MODEL) $(OPTIONS)

# Stages on a CPU; product: the plans that ship, on a GPU, some minutes.
bench: $(READY)
	$(PYTEST) lab/bench_*.py -m bench -s

product: $(READY)
	$(BIN)/python lab/bench_product.py --out artifacts/product.json $(OPTIONS)

# Minutes, most of them pip's; writes the page's outputs anew.
first-user: $(READY)
	PYTHON=$(CURDIR)/$(BIN)/python lab/first_user.sh

# Links and pages are checked; pages that come from the code are compared with it by the tests.
docs: $(READY)
	$(PIP) --constraint requirements.lock --requirement docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(DEMO) site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find kvcal tests -name __pycache__ -type d -prune -exec rm -rf {} +
