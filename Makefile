# Both commands of the README do all of their own set-up: virtual environment, pinned install, then the job.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export MUJOCO_GL ?= disable

.PHONY: demo test test-slow lint format types install clean help analyses published

help:            ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing qhyer and its pinned dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

install: $(STAMP)   ## virtual environment with the pinned dependencies

demo: $(STAMP)      ## data, QHyer and a baseline trained, evaluated, and a report: about 5 minutes on 2 cores
	@$(BIN)/qhyer demo

test: $(STAMP) lint types   ## formatting, types and the default tests (under 10 minutes on 2 cores)
	@$(BIN)/python -m pytest --numprocesses auto --dist loadfile

test-slow: $(STAMP) ## the slow checks: generator statistics, learning, fault injection at length
	@$(BIN)/python -m pytest -m slow --timeout 3600

lint: $(STAMP)
	@$(BIN)/ruff check src tests
	@$(BIN)/ruff format --check src tests

types: $(STAMP)
	@$(BIN)/mypy

format: $(STAMP)    ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix src tests
	@$(BIN)/ruff format src tests

clean:           ## remove the environment and caches (data, runs and reports stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist src/*.egg-info

published: $(STAMP) ## docs/published.md from the numbers in the code
	@$(BIN)/python -m qhyer.sources

analyses: $(STAMP)  ## the analyses that need no trained run, into results/analyses: minutes on 2 cores
	@$(BIN)/qhyer analyze gridworld-density --out results/analyses/gridworld-density
	@$(BIN)/qhyer analyze expectile-max --out results/analyses/expectile-max
	@$(BIN)/qhyer analyze coverage --out results/analyses/coverage
	@$(BIN)/qhyer analyze stitching --out results/analyses/stitching
