# make setup | demo | test | lint | docs | lock | tiny | tiny-words | verify-env
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
RECIPE ?= shapes_flow_grpo
GAIN ?= 0.10
ENGINE ?=
# The first Python on PATH that runs and is of a supported version; `make setup PYTHON=...` takes another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)

.PHONY: help setup demo test lint docs lock tiny tiny-words verify-env

help:
	@echo 'make setup                    environment in .venv, from the pinned requirements'
	@echo 'make demo                     the whole loop on this machine: RL on a tiny SD3, then a report'
	@echo 'make demo RECIPE=... GAIN=... the same with another recipe and another least gain in reward'
	@echo 'make demo ENGINE=sglang       the same, drawn by SGLang servers'
	@echo 'make tiny                     train the demo model anew from nothing, into build/shapes_sd3 (hours on a CPU)'
	@echo 'make tiny-words               the same for the model of drawn words, into build/words_sd3 (from that of shapes)'
	@echo 'make test                     lint, then every test'
	@echo 'make lint                     ruff, mypy, import direction, file lengths'
	@echo 'make docs                     write docs/settings.md from the settings themselves'
	@echo 'make verify-env               compare what is installed with the pins'
	@echo 'make lock                     pin the requirements anew (UPGRADE=--upgrade takes newer versions)'

setup: .venv/up-to-date

.venv/up-to-date: pyproject.toml requirements/dev.txt requirements/uv.txt
	@test -n '$(PYTHON)' || { echo 'make setup: needs Python 3.11 or 3.12 on PATH (or PYTHON=/path/to/python)' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/uv.txt
	@echo "installing the pinned packages into .venv: 11 GB, most of them torch, CUDA and SGLang"
# Compiled once here: a server, an engine and a test import thousands of modules each.
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --require-hashes -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

# What a run says last is where it is: another one at the same time cannot be taken for it.
SAID = mkdir -p build && said=$$(mktemp build/said.XXXXXX) && trap 'rm -f "$$said"' EXIT
RUN_FOLDER = "$$(sed -n 's,^report \(.*\)/report.html$$,\1,p' "$$said")"
POLICY = "$$(sed -n 's,^policy ,,p' "$$said")"
NUMBER = ^-?([0-9]+[.]?[0-9]*|[.][0-9]+)(e-?[0-9]+)?$$
demo: setup
	@[[ '$(GAIN)' =~ $(NUMBER) ]] || { echo "make demo: GAIN '$(GAIN)' is not a number; give the least rise of the reward, such as 0.10" >&2; exit 2; }
	$(SAID); $(BIN)/pyflyte -c flyte.config run workflows/post_train.py post_train --recipe $(RECIPE) \
		$(if $(ENGINE),--overrides '["rollout.engine.name=$(ENGINE)"]') | tee "$$said"; \
	$(BIN)/python -m mdiff_core.observe.report check $(RUN_FOLDER) --gain $(GAIN)

# The shipped tiny model from seeds alone, but for its VAE and text encoders, which are taken from assets/.
SHAPES = $(BIN)/python -m mdiff_core.worlds.shapes images --count 24000 --seed 7 --exclude assets/shapes_prompts/held_out.jsonl
SFT = $(BIN)/pyflyte -c flyte.config run workflows/sft.py sft --recipe
EXPORT = $(BIN)/python -m mdiff_core.export --weights ema --dtype float16
tiny: setup
	$(BIN)/python -m mdiff_core.worlds.tiny_sd3 blank --seed 0 --out build/shapes_sd3_blank
	$(SHAPES) --out build/shapes_images
	$(SAID); $(SFT) shapes_sft | tee "$$said"; $(EXPORT) --recipe shapes_sft $(POLICY) build/shapes_sd3_clean
	$(SHAPES) --mislabelled 0.1 --out build/shapes_images_web
	$(SAID); $(SFT) shapes_base | tee "$$said"; $(EXPORT) --recipe shapes_base $(POLICY) build/shapes_sd3

WORDS = $(BIN)/python -m mdiff_core.worlds.words images --count 24000 --seed 7 --exclude assets/words_prompts/held_out.jsonl
tiny-words: setup
	$(BIN)/python -m mdiff_core.worlds.tiny_sd3 build --world words --seed 0 --vae-steps 600 --out build/words_sd3_blank
	$(WORDS) --out build/words_images
	$(SAID); $(SFT) words_sft | tee "$$said"; $(EXPORT) --recipe words_sft $(POLICY) build/words_sd3_clean
	$(WORDS) --mislabelled 0.3 --out build/words_images_web
	$(SAID); $(SFT) words_base | tee "$$said"; $(EXPORT) --recipe words_base $(POLICY) build/words_sd3

test: lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet tests/unit/test_ceilings.py

docs: setup
	mkdir -p build
	$(BIN)/python -m mdiff_core.config --reference > build/settings.md
	mv build/settings.md docs/settings.md

# The superset is resolved first and constrains the rest, so that a package has one version in every file.
UPGRADE ?=
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-index-url --custom-compile-command 'make lock'
lock:
	mkdir -p build
	cat requirements/base.txt requirements/sglang.txt requirements/dev.txt > build/all.txt
	$(COMPILE) $(UPGRADE) pyproject.toml --all-extras --output-file build/all.txt
	$(COMPILE) pyproject.toml --constraint build/all.txt --extra wandb --output-file requirements/base.txt
	$(COMPILE) pyproject.toml --constraint build/all.txt --extra wandb --extra sglang --output-file requirements/sglang.txt
	$(COMPILE) pyproject.toml --constraint build/all.txt --extra wandb --extra sglang --extra dev --output-file requirements/dev.txt
	$(COMPILE) --group uv --output-file requirements/uv.txt

verify-env: setup
	$(BIN)/python requirements/verify.py requirements/dev.txt requirements/uv.txt
