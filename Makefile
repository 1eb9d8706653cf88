# All targets but gpu set up whatever is missing first, and may be run again at any time.
VENV := .venv/bin
DEMO := runs/arithmetic
SEED ?= 0
# One more than cores: many tests wait for other processes most of the time.
WORKERS ?= 3
STAMP := $(shell date +%Y%m%d-%H%M%S)
# Further settings for the demo, e.g. make demo SET="--set checkpoint_engine.backend=gloo"
SET ?=

.PHONY: help setup demo test test-all test-integrations fuzz installs test-zoo test-vllm coverage lint types docs gpu

help:
	@echo "make demo   set up (first time: a few minutes), then train an arithmetic policy: FSDP2 -> vLLM, fully async"
	@echo "make test   set up, then run the tests that hold every promise;  make test-all   further cases of these, too"
	@echo "make test-integrations   TRL and other frameworks, unmodified, with weightlane, each in an environment of its own"
	@echo "make fuzz   properties with other examples than make test draws, for MINUTES=10"
	@echo "make test-zoo   84 architectures beside vLLM's ordinary loading; writes the table of docs/reference/models.md"
	@echo "make test-vllm   the tests of vLLM rollouts with other releases of vLLM: VERSIONS=\"0.28.0 0.31.0\"; writes docs/reference/vllm-versions.md"
	@echo "make installs   installs the wheel by pip and from the network, without extras and with those in EXTRAS, and runs every command"
	@echo "make gpu    what one GPU allows, in eight minutes; PYTHON=... names a Python with torch for CUDA, PARTS=training,multi,vllm more"
	@echo "make docs   the documentation as a site, in build/site"
	@echo "make lint   ruff, and names that nothing uses;  make types   mypy"

setup:
	@.ci/setup-env

demo: setup
	@echo "== task, tokenizer and warmed-up model (about half a minute the first time)"
	@$(VENV)/python examples/arithmetic/prepare.py --out $(DEMO)/task-$(SEED) --seed $(SEED)
	@echo "== reinforcement learning (about three minutes)"
	@$(VENV)/weightlane train examples/arithmetic/arithmetic.toml \
		--set run.dir=$(DEMO)/run-$(STAMP) --set run.seed=$(SEED) --set model.path=$(DEMO)/task-$(SEED)/model \
		--set data.train=$(DEMO)/task-$(SEED)/train.jsonl --set data.heldout=$(DEMO)/task-$(SEED)/heldout.jsonl $(SET)

WORKING := -n $(WORKERS) --dist loadscope --no-loadscope-reorder
PYTEST := $(VENV)/pytest $(WORKING) --durations 30

test: setup
	@echo "== tests: every promise (about ten minutes on two cores; make test-all runs further cases, too)"
	@$(PYTEST) -m "not exhaustive"

test-all: setup
	@echo "== tests: all of them (about three quarters of an hour on two cores)"
	@$(PYTEST)

# Other frameworks, which pin what they need: each folder has a requirements.txt, and tests that `make test` does not collect.
INTEGRATIONS ?= $(wildcard plugins/packages/*/integration)
test-integrations: setup
	@for folder in $(INTEGRATIONS); do \
		echo "== $$folder" && python=$$(.ci/setup-integration $$folder) && $$python -m pytest $$folder || exit 1; \
	done

# Properties with other examples than `make test` draws, over and over: make fuzz MINUTES=60. What is found is printed with its seed.
MINUTES ?= 10
fuzz: setup
	@echo "== properties, with examples drawn at random, for $(MINUTES) minutes"
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
		WEIGHTLANE_TEST_PROFILE=fuzz timeout --signal INT $$((end - $$(date +%s) + 1)) $(VENV)/pytest $(WORKING) -q -m property; \
		code=$$?; [ $$code -eq 0 ] || [ $$(date +%s) -ge $$end ] || exit $$code; done

# The vLLM part of `make test` with other releases of vLLM's CPU build, each in front of .venv: writes docs/reference/vllm-versions.md.
# TESTED=tests/rollout/stock runs these alone.
VERSIONS ?= 0.28.0 0.29.0 0.30.0 0.31.0
test-vllm: setup
	@WORKERS=$(WORKERS) $(VENV)/python .ci/check-vllm $(VERSIONS) $(TESTED)

test-zoo: setup
	@$(VENV)/python tests/rollout/layout/zoo/zoo.py --document docs/reference/models.md

# Real installations from the package index, each in a fresh environment that is removed again; torch takes gigabytes where the
# index has no CPU build. EXTRAS="none hf plot" names others.
EXTRAS ?= none
installs: setup
	@$(VENV)/python .ci/check-installs $(EXTRAS)

# Lines and branches of the product that `make test` runs (TESTS=test-all: that all tests run), over all processes.
TESTS ?= test
coverage: setup
	@rm -f .coverage*
	@$(VENV)/coverage run -m pytest -q $(WORKING) $(if $(filter test,$(TESTS)),-m "not exhaustive") || echo "== some tests failed beside the measurement"
	@$(VENV)/coverage combine -q
	@$(VENV)/coverage report --skip-covered

# Uses the Python that is named, with its torch, and installs nothing: see benchmarks/gpu.
PYTHON ?= python3
PARTS ?= one
gpu:
	@$(PYTHON) -m benchmarks.gpu --parts $(PARTS) --document docs/performance.md

lint: setup
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/python .ci/dead_code.py
	@! git ls-files | xargs -d '\n' du -k | awk '$$1 > 256' | grep . || { echo "too large for the repository" >&2; exit 1; }

types: setup
	@$(VENV)/mypy

# The site is built from text, in an environment of its own that is made in seconds. DOCS=serve shows it while you write.
DOCS ?= build
docs:
	@.ci/setup-docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs $(DOCS) --quiet
	@echo "== build/site/index.html"
