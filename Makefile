# Every target does its own set-up in .venv the first time; `make` alone lists the targets.

# A first choice of interpreter can be named: make test PYTHON=/path/to/python
PYTHON ?=
# Test processes: one per core, up to eight. "make test WORKERS=0" runs them all in this process.
WORKERS ?= auto
# Another processor: "make test CPU=avx2" hides the instructions of later ones from all that ask for them.
CPU ?=
# More words for pytest or the benchmark: make test ARGS="-k rotary"
ARGS ?=

# How many cases `make fuzz` draws of each kind, and how many saves `make kill` ends; and where the drawing begins.
N ?=
SEED ?=
ONLY ?=

MODEL ?= examples/llamoe-tiny
IMAGE ?= examples/pictures/two_shapes.png
QUESTION ?= What is in the picture?

# Of each process of the tests two thirds of the time until it has imported torch and transformers go into compiling
# their modules if Python may not keep what it compiled, as some containers tell it.
unexport PYTHONDONTWRITEBYTECODE

AS-avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
AS := $(if $(CPU),env $(or $(AS-$(CPU)),$(error CPU=$(CPU): there is avx2)))

VENV := .venv
BIN := $(VENV)/bin/python
PIP := $(BIN) -m pip --disable-pip-version-check
LOWEST := .venv-lowest
PYTEST := -m pytest -n $(WORKERS) --maxprocesses=8 --dist=worksteal

LIBRARY := $(wildcard configuration serving modeling planning conversion)
# Tests of the repository itself; everything else must pass on an installed wheel, far from the checkout.
NOT_IN_WHEEL := test_benchmarks.py test_layout.py test_readme.py test_snippets.py test_wheel.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo chat train-tiny test test-all test-tools test-lowest fuzz kill lint format installed-names types docs wheel gpu bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-vision ## ask the small model in the repository about a picture
	@echo "picture:  $(IMAGE)"
	@echo "question: $(QUESTION)"
	@HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN) examples/describe_image.py $(MODEL) $(IMAGE) "$(QUESTION)"

chat: $(VENV)/.installed-page ## open a page to talk with that model and see its experts, or with another: MODEL=folder
	@HF_HUB_OFFLINE=1 $(BIN) -m llamoe chat $(MODEL) $(ARGS)

train-tiny: $(VENV)/.installed-vision ## train that model anew, in about an hour of one core, in trained-tiny/
	HF_HUB_OFFLINE=1 $(BIN) examples/tiny/train.py

test: $(VENV)/.installed-test ## run the tests of what an edit can break
	$(AS) $(BIN) $(PYTEST) $(ARGS)

test-all: $(VENV)/.installed-test ## also those with processes, compilers, pages, servers, fuzzing, kills and browsers
	$(AS) $(BIN) $(PYTEST) --run-slow $(ARGS)

test-tools: $(VENV)/.installed-tools ## run the slow tests of the command, and of others' programs on our models
	$(BIN) $(PYTEST) --run-slow tests/tools tests/llamoe_command $(ARGS)

# The oldest versions that pyproject.toml allows, and the wheel in place of the checkout: the tests run in a folder
# that holds nothing but them and the examples.
test-lowest: wheel ## run the tests on the wheel, with the lowest supported versions
	@$(BIN) .ci/lowest.py > $(VENV)/lowest.txt
	@cmp -s $(VENV)/lowest.txt $(LOWEST)/installed.txt || { \
		rm -rf $(LOWEST) && $(BIN) -m venv $(LOWEST) && \
		$(LOWEST)/bin/python -m pip --disable-pip-version-check install -q -r $(VENV)/lowest.txt && \
		cp $(VENV)/lowest.txt $(LOWEST)/installed.txt; }
	@$(LOWEST)/bin/python -m pip --disable-pip-version-check install -q --force-reinstall --no-deps dist/*.whl
	@outside=$$(mktemp -d) && trap 'rm -rf "$$outside"' EXIT && \
		cp -r tests examples pyproject.toml "$$outside" && python=$$PWD/$(LOWEST)/bin/python && cd "$$outside" && \
		$$python $(PYTEST) $(NOT_IN_WHEEL:%=--ignore=tests/%) $(ARGS)

fuzz: $(VENV)/.installed-test ## random models: N=6000 cases; SEED=… alone repeats one
	@cd tests && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 ../$(BIN) -W ignore -m fuzz \
		$(if $(filter-out auto,$(WORKERS)),--workers $(WORKERS)) $(if $(SEED),--seed $(SEED)) $(if $(N),--cases $(N)) $(ARGS)

kill: $(VENV)/.installed-test ## end saves at N=200 random moments, and look what is left
	LLAMOE_KILLS=$(or $(N),200) $(BIN) $(PYTEST) --run-slow -k kill $(ARGS)

lint: $(VENV)/.installed-dev ## check style and docstrings
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .

format: $(VENV)/.installed-dev ## format the code and repair what can be repaired
	$(BIN) -m ruff check --fix .
	$(BIN) -m ruff format .

# The library folders under the names that they have when installed, for tools that read files without importing them.
installed-names: | $(BIN)
	@rm -rf $(VENV)/types && mkdir -p $(VENV)/types/llamoe
	@ln -s $(addprefix $(CURDIR)/,llamoe/__init__.py llamoe/py.typed $(LIBRARY)) $(VENV)/types/llamoe/

types: $(VENV)/.installed-dev installed-names ## check types
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN) -m pyright --pythonpath $(BIN)

# The pages are linked under the paths that they have here: their links hold in the repository and on the site.
docs: $(VENV)/.installed-docs installed-names ## build the pages and the reference of all names in site/
	@rm -rf site $(VENV)/pages && mkdir -p $(VENV)/pages/benchmarks
	@ln -s $(addprefix $(CURDIR)/,README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs examples) $(VENV)/pages/
	@ln -s $(CURDIR)/benchmarks/results $(VENV)/pages/benchmarks/
	@NO_MKDOCS_2_WARNING=1 $(BIN) -m mkdocs build --strict --quiet
	@$(BIN) .ci/check_pages.py site

wheel: $(VENV)/.installed-test ## build the source archive and the wheel in dist/
	@rm -rf build dist
	$(BIN) -m build --no-isolation --outdir dist . > $(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	@ls dist

gpu: $(VENV)/.installed-bench ## prove on a CUDA device what the pages say of GPUs
	HF_HUB_OFFLINE=1 $(BIN) -m benchmarks.prove_gpu $(ARGS)

bench: $(VENV)/.installed-bench ## measure speed and memory against transformers on this CPU, in half an hour
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(AS) $(BIN) -m benchmarks.cpu $(ARGS)

clean: ## remove what was built or installed here
	rm -rf $(VENV) $(LOWEST) build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

EXTRAS-tools := test,evaluate
# The extras that come with an extra.
WITH-vision := vision
WITH-page := vision page
WITH-test := vision page test
WITH-dev := vision page test dev
WITH-tools := vision page test tools
WITH-bench := bench
WITH-docs := docs

# Python compiles the modules that it imports; pip would compile all, which is a third of an installation's work.
$(VENV)/.installed-%: pyproject.toml | $(BIN)
	$(PIP) install -q --no-compile -e '.[$(or $(EXTRAS-$*),$*)]'
	@touch $(WITH-$*:%=$(VENV)/.installed-%)

$(BIN):
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
			echo "setting up $(VENV) with $$("$$python" --version); the first time takes a few minutes"; \
			"$$python" -m venv $(VENV) && exit 0; rm -rf $(VENV); \
		fi; \
	done; \
	echo "llamoe needs Python 3.11 or newer with its venv module; none was found on the PATH." >&2; \
	echo "Install one, or name it: make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python" >&2; exit 1
