# `make` alone lists what there is. Every target that needs the packages installs them first (scripts/setup.py).
.DEFAULT_GOAL := help
.PHONY: help setup serve test check check-code check-tests format demo adapters bench dashboards lock clean

PY := .venv/bin/python
CONFIG ?= cluster.yaml

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: ## create .venv and install the locked packages (CPU or CUDA, as the machine has it)
	@sh scripts/setup.sh

serve: setup ## prepare the default model and serve CONFIG=cluster.yaml until Ctrl-C
	@$(PY) -m app.default_model
	@exec .venv/bin/halo serve "$(CONFIG)"

test: setup ## all tests that this machine can run: pure, Ray, vLLM
	@$(PY) -m pytest tests

check: setup ## ruff, mypy, import rules, pure tests: under two minutes
	@$(MAKE) --no-print-directory -j2 --output-sync=target check-code check-tests

check-code:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

check-tests:
	$(PY) -m pytest tests/pure

format: setup ## let ruff rewrite what it can
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

demo: setup ## four services under load: attainment per service with fcfs, halo-paper and halo
	@$(PY) -m app.default_model
	@$(PY) -m benchmarks.demo

adapters: setup ## train the four example adapters again from examples/
	@$(PY) -m app.default_model
	@$(PY) -m scripts.train_adapters --service all

bench-%: setup ## run one benchmark, as in `make bench-driver ARGS="--help"`
	@$(PY) -m benchmarks.$(subst -,_,$*) $(ARGS)

dashboards: setup ## build dashboards/*.json anew
	@$(PY) -m dashboards.build

lock: setup ## resolve requirements/*.lock anew (needs uv)
	@$(PY) scripts/lock.py

clean: ## remove .venv and everything generated; the prepared model in .cache stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .setup.lock
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
