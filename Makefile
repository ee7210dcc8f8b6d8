# A bare `make` lists the targets. Each installs what it needs into .venv first, and again when the pins change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

SEED := 0  # which version of the exercises a class gets

BROWSERS := chromium chromium-browser google-chrome
INSTALL_CHROMIUM = $(if $(filter 0,$(shell id -u)),,sudo -n) apt-get install --yes --quiet chromium

HANDED_OUT := $(if $(wildcard solutions),exercises/.handed_out)  # a student's copy of the course has no solutions

.PHONY: help init train test nightly lint format lab docs browser export exercises student grade feedback formgrader similar grade-all bench bench-full bands faults scaling release clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

init: $(VENV)/.dev  ## Set up .venv with everything the course uses, and the checks before each commit
	@if git rev-parse --git-dir > /dev/null 2>&1; then $(BIN)/pre-commit install; fi

train: $(VENV)/.runtime  ## Train a small model on real text; it ends up under runs/
	$(BIN)/llm-course train --config configs/first_run.yaml

test: $(VENV)/.dev  ## Prove the whole course: export, lint, types, every notebook, every test
	$(BIN)/python scripts/check.py

nightly: $(VENV)/.dev  ## Prove again what `make test` proves by a shorter way: every page in a kernel, the wheel installed
	$(BIN)/python scripts/check.py kernels nightly

lint: $(VENV)/.dev  ## Check style and types alone
	$(BIN)/python scripts/check.py lint types

format: $(VENV)/.dev  ## Lay out notebooks and code
	$(BIN)/ruff format nbs solutions tests scripts benchmarks docs lab conftest.py

lab: $(VENV)/.dev $(HANDED_OUT)  ## Open the course in JupyterLab, with the exercises that its pages lead to
	JUPYTER_CONFIG_PATH="$(CURDIR)/lab" $(BIN)/jupyter-lab

docs: $(VENV)/.dev  ## Build the site from the stored pages: _docs/html/index.html
	$(BIN)/python scripts/check.py docs

browser: $(VENV)/.dev  ## See the course and the site in Chromium, as a student does
	@$(foreach name,$(BROWSERS),command -v $(name) > /dev/null ||) $(INSTALL_CHROMIUM) || \
	  { echo "Install Chromium or Chrome, so that one of these starts: $(BROWSERS)"; exit 1; }
	$(BIN)/python scripts/check.py docs browser

export: $(VENV)/.dev  ## Write llm_course/ from the notebooks, and clean the notebooks
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_clean --fname solutions

exercises: $(VENV)/.dev  ## Write the student versions of the exercises to exercises/
	$(BIN)/python scripts/exercises.py

student: $(VENV)/.dev  ## Write all that students need, and no solutions: make student DIR=FOLDER
	$(BIN)/python scripts/exercises.py student "$(DIR)" --seed $(SEED)

grade: $(VENV)/.dev  ## Grade what came back, FOLDER/STUDENT/NN_name.ipynb or an archive of Moodle or Canvas: make grade DIR=FOLDER
	$(BIN)/python scripts/exercises.py grade "$(DIR)" --seed $(SEED)

formgrader: $(VENV)/.dev  ## Grade written answers by hand, after `make grade`
	cd _nbgrader && ../$(BIN)/jupyter-lab --LabApp.default_url=/formgrader

feedback: $(VENV)/.dev  ## Write grades and feedback again, after `make formgrader`
	$(BIN)/python scripts/exercises.py feedback

similar: $(VENV)/.dev  ## List answers that resemble each other: make similar DIR=FOLDER
	$(BIN)/python scripts/exercises.py similar "$(DIR)"

grade-all: $(VENV)/.dev  ## Grade a right and a wrong copy of every exercise, and try every attack on the grader
	$(BIN)/python -m pytest -q -n auto tests/test_grading.py

bench: $(VENV)/.dev  ## Measure this machine beside other libraries, in a few minutes: benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

bench-full: $(VENV)/.dev  ## The same with more rounds
	$(BIN)/python -m benchmarks --full

bands: $(VENV)/.dev  ## Record again what healthy runs look like, for `llm-course check-run`, in some minutes
	$(BIN)/python scripts/bands.py
	$(BIN)/python scripts/two_processes.py

faults: $(VENV)/.dev  ## Plant mistakes in runs, and see whether `llm-course check-run` names them, in some minutes
	$(BIN)/python -m tests.faults

scaling: $(VENV)/.dev  ## Make the runs of chapter 22 again, fit their law and test its prediction, in three quarters of an hour
	$(BIN)/python scripts/scaling.py

release: $(VENV)/.dev  ## Build the wheel and the source distribution, as a tag does: dist/
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean:  ## Remove .venv and everything generated, but not runs/
	rm -rf $(VENV) build dist _docs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find llm_course tests scripts nbs -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

exercises/.handed_out: $(wildcard solutions/*.ipynb) | $(VENV)/.dev
	@$(BIN)/python scripts/exercises.py && touch $@

# Two stamps, so that training does not wait for the tools of the classroom.
$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(v < (3, 11) and 'llm_course needs Python 3.11 or later, and $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12 ...' % v[:2])"
	@echo "Setting up $(VENV) (once; PyTorch is a large download) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Adding the notebook and test tools ..."
	@$(INSTALL) -e ".[dev]"
	@touch $@
