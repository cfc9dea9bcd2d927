# kvmesh: everything a developer does, from a clean clone with nothing but Python 3.11 or later.
#
#   PYTHON=python3.12            the interpreter that .venv is made from
#   TORCH_SPEC="torch==2.11.0"   another torch (within the range of pyproject.toml)
#   PIP_EXTRA_ARGS="..."         e.g. --index-url and the CPU or CUDA index of your choice, for torch
#   ARGS="--prefill 2"           arguments of `kvmesh up` or of pytest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
PIP_EXTRA_ARGS ?=
VLLM_ENV ?= .venv-vllm
ARGS ?=
BIN := $(VENV)/bin
RUN := $(VENV)/.stamp-run
DEV := $(VENV)/.stamp-dev
NATIVE := $(wildcard kvmesh/engine/cpu/*.cpp kvmesh/engine/cpu/*.h kvmesh/engine/cpu/*.py) \
	$(wildcard kvmesh/native/*.cpp kvmesh/native/*.h kvmesh/native/*.py)

DOCS := $(VENV)/.stamp-docs

.PHONY: help up docs reference test test-all test-rest test-long test-compose vllm-env soak chaos check lint format bench proto clean install install-dev rdma-guest

help: ## this list
	@echo "kvmesh"; grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.stamp-torch:
	@scripts/make_venv.sh $(VENV) "$(TORCH_SPEC)" $(PIP_EXTRA_ARGS)
	@touch $@

$(RUN): $(VENV)/.stamp-torch pyproject.toml $(NATIVE)
	@scripts/pip_install.sh $(VENV) "kvmesh" -e .
	@$(BIN)/python -m compileall -q kvmesh services # else the processes of the first mesh do, all at once
	@$(BIN)/python -m kvmesh.engine.cpu.build
	@$(BIN)/python -m kvmesh.native.build
	@touch $@

$(DEV): $(VENV)/.stamp-torch pyproject.toml $(NATIVE)
	@scripts/pip_install.sh $(VENV) "kvmesh and what its tests need" -e '.[dev]'
	@$(BIN)/python -m kvmesh.engine.cpu.build
	@$(BIN)/python -m kvmesh.native.build
	@scripts/install_redis.sh
	@scripts/fetch_json_schema_suite.sh $(VENV)
	@touch $@ $(RUN)

install: $(RUN) ## make .venv with what kvmesh needs

install-dev: $(DEV) ## ... and what its tests need

up: $(RUN) ## start a mesh here and ask it something
	@exec $(BIN)/kvmesh up $(ARGS)

test: $(DEV) ## the quick tests, before every commit; ARGS="tests/store -k names": pytest with these arguments
	@scripts/install_redis.sh
	@scripts/fetch_json_schema_suite.sh $(VENV)
	@$(BIN)/python scripts/run_tests.py $(or $(ARGS),--quick)

test-all: ## everything that this machine can run: the quick tests, the rest, and the mesh in containers
	@$(MAKE) --no-print-directory test ARGS=
	@$(MAKE) --no-print-directory test-rest
	@$(MAKE) --no-print-directory test-long

test-rest: $(DEV) ## what `make test` leaves out, but for containers: slow tests, more examples, whole meshes, storms
	@scripts/install_redis.sh
	@scripts/fetch_json_schema_suite.sh $(VENV)
	@$(BIN)/python scripts/run_tests.py --rest

test-long: $(DEV) ## what CI leaves out: more families, all examples, and the mesh in containers with every fault
	@scripts/install_redis.sh
	@$(BIN)/python scripts/run_tests.py --long
	@COMPOSE_TEST_FAULTS=. $(MAKE) --no-print-directory test-compose

vllm-env: $(DEV) ## an environment with vLLM for CPUs, VLLM_ENV=.venv-vllm; then PYTHON_OF_VLLM=... make test-long
	@PIP_EXTRA_ARGS="$(PIP_EXTRA_ARGS)" $(BIN)/python -m scripts.vllm_env $(VLLM_ENV)

test-compose: $(DEV) ## the mesh in containers, struck under load: needs a Docker daemon, or root on Debian 12
	@PYTHON=$(BIN)/python scripts/test_compose.sh $(ARGS)

soak: $(DEV) ## a minute of noise at each entry point: protos, transfer engine, fast path
	@FUZZ_S=60 $(BIN)/python -m pytest -q -s tests/fuzz $(ARGS)

chaos: $(DEV) ## storms over the Store, ARGS="--chaos-minutes 30" for longer, KVMESH_CHAOS_SEED=N for one again
	@$(BIN)/python -m pytest -q -s tests/chaos $(ARGS)

check: $(DEV) ## style, types, imports, generated code, released fields
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q . || { echo "run: make format" >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@PYTHON=$(BIN)/python scripts/gen_protos.sh --check
	@$(BIN)/python scripts/check_protos.py

lint: $(DEV) ## the fast part of check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .

format: $(DEV) ## rewrite the sources in the house style
	@$(BIN)/ruff check --fix -q . && $(BIN)/ruff format .

bench: $(DEV) ## time by stage against the same engine in one process
	@$(BIN)/python -m benchmarks.mesh $(ARGS)

rdma-guest: ## make the kernel and files that RDMA tests run in: seconds with a prebuilt kernel, else minutes
	@scripts/rdma/build.sh

$(DOCS): $(RUN)
	@scripts/pip_install.sh $(VENV) "what the documentation is built with" -e '.[docs]'
	@touch $@

docs: $(DOCS) ## the documentation as a site in site/, offline; a warning is an error
	@$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs site
	@echo "open site/index.html"

reference: $(RUN) ## write docs/reference/{cli,config,metrics,api}.md and the lists of pages from the code
	@$(BIN)/python -m scripts.gen_reference

proto: $(DEV) ## generate kvmesh/rpc/pb from protos/
	@PYTHON=$(BIN)/python scripts/gen_protos.sh

clean: ## remove the environment and all caches
	@rm -rf $(VENV) build dist site ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
