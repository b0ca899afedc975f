# make train   a fresh machine to a trained agent        make test   a fresh machine to a tested checkout
PYTHON ?= python3
VENV := .venv
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: train test lint install
.DELETE_ON_ERROR:

train: $(VENV)/installed
	$(VENV)/bin/python -m scripts.train configs/countdown_tiny.toml

test: install
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 4

lint: install
	$(VENV)/bin/ruff check .

install: $(VENV)/installed-all

$(VENV)/installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "turngym needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet --constraint requirements.lock --editable .
	@touch $@

# One of ALFWorld's packages is built on the spot, by a script that calls `python`.
$(VENV)/installed-all: $(VENV)/installed
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/pip install --quiet --constraint requirements.lock --editable '.[all,test]'
	@touch $@
