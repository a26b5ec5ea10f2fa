# Two commands do everything on a fresh machine: `make finetune` and `make test`. The first of them makes .venv.

PYTHON ?= python3
STAGE ?= 3
N ?= 1000
WORKERS ?= 3
STEPS ?= 2000
ROUNDS ?= 20
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := benchmarks hf_zero scripts tests

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Made once; installed again only when what is installed has changed. pip goes first: an old one cannot install this.
$(READY): pyproject.toml constraints.txt
	@echo "making the environment in $(VENV); the first time takes minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

.PHONY: finetune
finetune: $(READY) ## train gpt2-tiny under ZeRO on the GPUs there are, else 2 CPU ranks (STAGE=3 RANKS=n ARGS='…')
	@set -e; ranks="$${RANKS:-$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)')}"; set -x; \
	OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" $(BIN)/python -m torch.distributed.run --standalone \
	--nproc-per-node "$$ranks" scripts/finetune.py --zero-stage $(STAGE) $(ARGS)

.PHONY: test
test: $(READY) ## run the tests (ARGS='-k name' for some, WORKERS=0 for one process)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --no-loadscope-reorder $(ARGS)

# Long tests start processes of their own, with time limits.
test-all: WORKERS := 2
.PHONY: test-all
test-all: $(READY) ## run these and all further combinations: hours (ARGS=@tests/ci.txt for what CI runs beyond `make test`)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --no-loadscope-reorder -m 'not torture' $(ARGS)

.PHONY: torture
torture: $(READY) ## ranks lost and killed, long runs: hours (STEPS=2000 and ROUNDS=20 are how long; ARGS='-k name' for some)
	HF_ZERO_STEPS=$(STEPS) HF_ZERO_ROUNDS=$(ROUNDS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m torture --verbose $(ARGS)

.PHONY: programs
programs: $(READY) ## compare random programs with plain data parallel, N=1000 of them (ARGS='--kinds …' for some)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.random --seeds 0:$(N) $(ARGS)

.PHONY: mutants
mutants: $(READY) ## plant bugs in copies of the package, one at a time; the default tests must fail (ARGS='--only …' for some)
	$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: compat-matrix
compat-matrix: $(READY) ## delete one file of compat/ at a time: which programs fail then (ARGS='--only writes --verbose' for some)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.compat_matrix $(ARGS)

.PHONY: lint
lint: $(READY) ## look for mistakes and for unformatted files
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

.PHONY: types
types: $(READY) ## check types
	$(BIN)/mypy

.PHONY: docs
docs: $(READY) ## build the documents as a site, in site/
	$(BIN)/mkdocs build

.PHONY: audit
audit: $(READY) ## dependencies that contradict each other, and those with known holes (the second needs the network)
	$(PIP) check
	@$(PIP) install --quiet pip-audit || { echo "audit: not looked up: pip-audit cannot be installed; is there a network?"; exit 1; }
	@$(BIN)/pip-audit --skip-editable --local || { echo "audit: above are the holes, or why nothing was looked up"; exit 1; }

.PHONY: style
style: $(READY) ## format, and apply automatic fixes
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.PHONY: quality
quality: lint types ## lint and types

.PHONY: benchmark
benchmark: $(READY) ## compare with peers on a small model, in minutes; JSON in runs/ (benchmarks/compare.py does more)
	$(BIN)/python benchmarks/compare.py --model-size 7m --engines ddp zero1 zero2 zero3 fsdp2 --blocks 4 \
	--output runs/benchmark.json $(ARGS)

.PHONY: benchmark-counts
benchmark-counts: $(READY) ## count the Python calls, collectives and bytes of a step, and compare them with bounds
	$(BIN)/python benchmarks/counts.py $(ARGS)

.PHONY: peers
peers: $(READY) ## add DeepSpeed to the environment, without compiled operators, for benchmarks/
	$(PIP) install --quiet --upgrade setuptools wheel
	DS_BUILD_OPS=0 $(PIP) install --quiet --no-build-isolation --constraint constraints.txt --editable '.[bench]'

.PHONY: clean
clean: ## remove what was made here, but not what was trained (runs/)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
