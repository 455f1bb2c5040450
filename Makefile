# make run    serve the example on http://127.0.0.1:8000      make test   every test, a private Redis included
# make check  style, types, import directions                 make quick  the tests that need no server, after each edit
# make bench  LimitGate beside its peers                      make bench-overload   the adaptive limit on servers under load
# make demo   a real access log through the limiter           make fuzz   the property tests and fuzzers, for much longer
# make dist   wheel and sdist into dist/                      make test-wheel   every test of the sdist against the wheel
# make docs   what docs/ has of the code: tables, a picture      make coverage   every test, and which lines they run
# make test-oldest   tests of all that others provide with the oldest versions of it, without hiredis
# make matrix   versions of Python, stores and servers, into docs/compatibility.md
# make soak   half an hour of requests and faults, does anything grow?
# make upgrade   the previous release and this code side by side on one Redis
# make site   the documentation as a website, into build/site      make site-check   each page in a browser: axe-core, requests
# make release   builds and checks a release from a clean tag
# make bench-count   instructions that a request takes, kept for a test to compare with
# make simulate   processes, network and Redis on virtual time, by seed (SEEDS=10000)

PYTHON ?= python3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE :=    # else every process that a test starts compiles what it imports anew

.PHONY: soak upgrade matrix release check-interface site site-check run test quick coverage test-oldest test-wheel check docs bench bench-count bench-overload demo dist fuzz simulate redis valgrind promtool proxies chromium clean

PORT ?= 8000
run: .venv/example    # PORT=8001
	$(BIN)/uvicorn example_app.main:app --host 127.0.0.1 --port $(PORT) --no-proxy-headers

test: .venv/dev redis valgrind promtool proxies chromium
	$(BIN)/pytest -n 4 --dist worksteal -m "not alone"    # for two cores: tests wait for half of the time
	$(BIN)/pytest -m alone

quick: .venv/dev
	$(BIN)/pytest -n 2 --dist worksteal --quick

coverage: .venv/dev redis proxies
	$(BIN)/pytest -n 3 --dist worksteal -m "not alone" --cov --cov-report=
	$(BIN)/pytest -m alone --cov --cov-append --cov-report=term-missing:skip-covered --cov-fail-under=95

test-oldest: redis
	@scripts/test-oldest $(PYTHON) -n 2 --dist worksteal -m "not alone" tests/stores tests/limiter tests/rules tests/routes \
		tests/integrations tests/outbound tests/observing tests/command --ignore tests/outbound/test_sdks.py    # SDKs need newer ones

test-wheel: dist redis
	@scripts/test-wheel $(PYTHON) -n 4 --dist worksteal

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py

docs: .venv/dev
	$(BIN)/python -m handbook

bench: .venv/bench redis
	$(BIN)/python -m benchmarks --write

bench-overload: .venv/dev
	$(BIN)/python -m benchmarks.overload --write

bench-count: .venv/dev redis
	@scripts/ensure-valgrind
	$(BIN)/python -m benchmarks.instructions

dist: .venv/dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

release: .venv/release redis    # from a clean tag; RELEASE=--quick leaves out the tests of the wheel
	@$(BIN)/python scripts/release.py $(RELEASE)

matrix: .venv/dev redis    # CELLS="python-3.14 valkey-9.1" runs some
	$(BIN)/python scripts/matrix.py $(CELLS)

soak: .venv/dev redis    # SECONDS=1800
	$(BIN)/python -m benchmarks.soak --seconds $(or $(SECONDS),1800)

upgrade: .venv/dev redis    # FROM=v1.0.0 is the version to run beside this one
	$(BIN)/python scripts/upgrade.py $(FROM)

check-interface: .venv/release
	@$(BIN)/python scripts/check_interface.py

site: .venv/site
	$(BIN)/python -m handbook.site

site-check: site chromium
	$(BIN)/python -m handbook.site_check

demo: .venv/dev redis
	$(BIN)/python -m tests.access_log

fuzz: .venv/dev redis proxies
	$(BIN)/python -m tests.attacks.fuzz --inputs 1000000
	$(BIN)/python -m tests.attacks.path_fuzz --paths 50000
	$(BIN)/python -m tests.attacks.cpu --seconds 300
	-$(BIN)/pip install --quiet --editable '.[dev,fuzz]'
	$(BIN)/python -m tests.attacks.atheris_fuzz --seconds 300
	LIMITGATE_TEST_EXAMPLES=100000 $(BIN)/pytest tests/forward
	LIMITGATE_TEST_EXAMPLES=100000 $(BIN)/pytest -k "differential or property or fuzz"

SEEDS ?= 10000
simulate: .venv/dev
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

redis:
	@scripts/ensure-redis

valgrind:    # without it, instructions are not counted
	-@scripts/ensure-valgrind

promtool:    # without it, alerts are not tested
	-@scripts/ensure-promtool

proxies: .venv/dev    # without them, their tests are skipped
	-@scripts/ensure-proxies $(BIN)

chromium:    # without it, pages are not tested in a browser
	-@scripts/ensure-chromium

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "LimitGate needs Python 3.11 or newer, not %s: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	$(PYTHON) -m venv .venv

.venv/example: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable '.[example]'
	@touch $@

.venv/dev: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

.venv/release: .venv/dev
	$(BIN)/pip install --quiet --editable '.[dev,release]'
	@touch $@

.venv/site: .venv/dev
	$(BIN)/pip install --quiet --editable '.[dev,site]'
	@touch $@

.venv/bench: .venv/dev
	$(BIN)/pip install --quiet --editable '.[dev,bench]'
	@touch $@

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
