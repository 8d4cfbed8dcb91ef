# Two commands on a fresh machine: make demo, make test. Both make their own environment from Python >= 3.11 alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what is imported, a small part of all that is installed.
PIP := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
export OMP_NUM_THREADS ?= 1
# Bytecode is compiled once, and not by each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-durability test-deploy lint types docs examples smoke smoke-studies gpu wheel readme benchmarks check clean

demo: $(VENV)/.plain
	$(BIN)/python examples/pfedvem.py --jobs 2 --out runs/demo

# Two processes, where a single file is quicker in one: `.venv/bin/python -m pytest tests/base`.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.test
	$(PYTEST) -m "not slow"

# What takes more than two seconds a test.
test-slow: $(VENV)/.test
	$(PYTEST) -m slow --durations=10

# Fifty kills over thirty rounds, twelve of a study, two thousand mutations, and ten Pyro models, where `test-slow` has fewer of each.
test-durability: $(VENV)/.test
	BAYESFL_DURABILITY=full $(BIN)/python -m pytest tests/recovery/test_durability.py tests/recovery/test_mutations.py tests/study/test_study.py tests/pyro/test_models.py

# A real network on this machine; DEPLOY=ci leaves out what waits for Flower's heartbeats, and regressions.
DEPLOY ?= full
test-deploy: $(VENV)/.test
	BAYESFL_DEPLOY=$(DEPLOY) $(BIN)/python -m pytest tests/flower/test_deploy.py tests/flower/test_deploy_statistics.py --durations=10

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/pyright

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -E -n -W --keep-going docs docs/_build

# Every example and every benchmark at smoke size, but those that the tests run; anew, as finished runs are read.
examples: $(VENV)/.plain
	rm -rf runs/smoke*
	$(BIN)/python examples/pfedvem.py --clients 4 --rounds 2 --seeds 0 1 --participation 0.5 --out runs/smoke
	$(BIN)/python examples/subnetwork_laplace.py --seeds 0 --examples 60 --out runs/smoke-laplace
	$(BIN)/python examples/fedsi.py --seeds 0 --rounds 3 --out runs/smoke-fedsi
	$(BIN)/python examples/fedem.py --clients 12 --rounds 3 --rates 0.3 --test 50 --out runs/smoke-fedem
	$(BIN)/python examples/fedpac.py --clients 8 --rounds 2 --rates 0.03 --seeds 0 --out runs/smoke-fedpac
	$(BIN)/python examples/perinvfl.py --rounds 3 --anneal 1 --out runs/smoke-perinvfl
	$(BIN)/python examples/promises.py --data digits --rounds 3 --out runs/smoke-promises

smoke: $(VENV)/.plain
	$(BIN)/python benchmarks/engines.py --quick --no-neighbour --rows mlp10
	$(BIN)/python benchmarks/memory.py --quick
	$(BIN)/python benchmarks/scale.py --quick
	$(BIN)/python benchmarks/sensitivity.py --quick
	$(BIN)/python benchmarks/sensitivity.py --quick --rates
	$(BIN)/python benchmarks/curvature.py --quick --threads 1 --rows diagonal factor predict lenet_diagonal
	$(BIN)/python benchmarks/gpu.py --quick --device cpu
	$(BIN)/python benchmarks/fedsi.py --quick
	$(BIN)/python benchmarks/curvature_every.py --quick
	$(BIN)/python benchmarks/selection.py --quick
	$(BIN)/python benchmarks/pfedvem.py --quick
	$(BIN)/python benchmarks/links.py --quick
	$(BIN)/python benchmarks/densities.py --quick
	$(BIN)/python benchmarks/promises.py --quick
	$(BIN)/python benchmarks/simplex.py --quick
	$(BIN)/python benchmarks/privacy.py --quick

smoke-studies: $(VENV)/.plain
	$(BIN)/python benchmarks/truth.py --quick
	for paper in common fedem fedpac fedsi perinvfl pfedvem; do \
	  $(BIN)/python -m benchmarks.papers $$paper --quick || exit 1; done

# At most eight minutes on a machine with one GPU, by the Python that PYTHON names, which has torch, pytest and bayesfl's
# other requirements: installs and downloads nothing. BAYESFL_DATA has what benchmarks/subset.py writes.
gpu: export PYTHONPATH := $(CURDIR)
gpu:
	timeout 120 $(PYTHON) -m pytest tests/engine/test_cuda.py
	timeout 120 $(PYTHON) benchmarks/gpu.py
	timeout 230 $(PYTHON) -m benchmarks.papers pfedvem --device cuda || test $$? -eq 124

# The wheel, in an empty environment without the development tools.
wheel: $(VENV)/.test
	rm -rf dist && $(BIN)/python -m build --quiet --wheel
	rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --no-compile -c constraints.txt dist/*.whl
	cd dist && ../.venv-wheel/bin/python ../tests/ten_lines.py
	rm -rf .venv-wheel

# Tables and answers of the pages, from the committed results.
readme: $(VENV)/.plain
	$(BIN)/python docs/tables.py

benchmarks: $(VENV)/.plain
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/sensitivity.py
	$(BIN)/python benchmarks/curvature.py
	$(BIN)/python benchmarks/fedsi.py
	$(BIN)/python benchmarks/selection.py
	$(BIN)/python benchmarks/simplex.py
	$(BIN)/python benchmarks/privacy.py
	$(BIN)/python benchmarks/networks.py

check: test test-slow lint types docs examples smoke smoke-studies wheel
	$(MAKE) test-deploy DEPLOY=ci

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bayesfl needs Python >= 3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.plain: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[privacy]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[test,privacy]'
	touch $@ $(VENV)/.plain

$(VENV)/.docs: $(VENV)/.test
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-wheel build dist runs docs/_build *.egg-info
