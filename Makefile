# The commands that a contributor needs. Each one works in a fresh clone: it makes .venv and installs what it lacks.
#
#   make test      linters, type checker, all tests; then those of transformers' interfaces on the oldest version supported
#   make demo      train, save, reload and sample a small language model
#   make docs      the pages of docs/ as a website in site/
#   make lint      ruff and mypy           make format    let ruff rewrite
#   make bench     all benchmarks          make clean     remove what make made

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=

NEWEST := $(shell sed -n 's/^transformers==//p' constraints.txt)
OLDEST := 5.18.0
OLDEST_TESTS := tests/test_generation_lact.py tests/test_cache_ttt.py tests/test_remote_code.py \
                tests/test_packing_lact.py tests/test_modeling_lact.py tests/test_modeling_lact_loading.py tests/test_vittt_golden.py \
                tests/test_image_processing_vittt.py tests/test_remote_code_vittt.py \
                tests/test_modeling_lact_nvs.py tests/test_processing_lact_nvs.py tests/test_remote_code_lact_nvs.py \
                tests/test_scene_lact_nvs.py tests/test_serving.py
BENCHMARKS := $(wildcard benchmarks/bench_*.py)

VENV := .venv/bin/python
PIP := $(VENV) -m pip --disable-pip-version-check
INSTALLED := .venv/.installed
# transformers' own model tests, which only its source distribution holds, and its oldest supported version.
NEWEST_TESTS_DIR := .cache/transformers-$(NEWEST)
OLDEST_SITE_DIR := .cache/transformers-$(OLDEST)-site

OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 \
           HF_HOME="$(CURDIR)/.cache/huggingface"
PYTEST := env $(OFFLINE) OMP_NUM_THREADS=1 \
          HF_TTT_TRANSFORMERS_TESTS="$(CURDIR)/$(NEWEST_TESTS_DIR)" \
          HF_TTT_OLDEST_TRANSFORMERS="$(CURDIR)/$(OLDEST_SITE_DIR)"

.PHONY: install fetch test lint format demo docs bench clean

test: lint fetch
	$(PYTEST) $(VENV) -m pytest -n $(WORKERS) $(PYTEST_ARGS)
	$(PYTEST) PYTHONPATH="$(CURDIR)/$(OLDEST_SITE_DIR)" $(VENV) -m pytest -n $(WORKERS) $(PYTEST_ARGS) $(OLDEST_TESTS)

lint: install
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy

format: install
	$(VENV) -m ruff check --fix .
	$(VENV) -m ruff format .

demo: install
	env $(OFFLINE) $(VENV) examples/demo_lact_text.py --output_dir demo-output

docs: install
	$(VENV) -m mkdocs build --strict

bench: install
	@test -n "$(BENCHMARKS)" || { echo "no benchmarks/bench_*.py"; exit 1; }
	set -e; for script in $(BENCHMARKS); do env $(OFFLINE) $(VENV) $$script; done

clean:
	rm -rf .venv .cache demo-output site build dist src/*.egg-info

install: $(INSTALLED)

fetch: $(NEWEST_TESTS_DIR)/.fetched $(OLDEST_SITE_DIR)/.fetched

$(INSTALLED): setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -qq -c constraints.txt -e '.[all,nvs,test]'
	touch $@

$(NEWEST_TESTS_DIR)/.fetched: | $(INSTALLED)
	rm -rf $(@D) && mkdir -p $(@D)
	$(PIP) download -qq --no-deps --no-binary transformers -d $(@D) transformers==$(NEWEST)
	tar -xzf $(@D)/transformers-$(NEWEST).tar.gz -C $(@D) --strip-components 1 transformers-$(NEWEST)/tests
	rm $(@D)/transformers-$(NEWEST).tar.gz
	touch $@

$(OLDEST_SITE_DIR)/.fetched: | $(INSTALLED)
	rm -rf $(@D)
	$(PIP) install -qq --no-deps --target $(@D) transformers==$(OLDEST)
	env $(OFFLINE) PYTHONPATH=$(@D) $(VENV) -c "import transformers; assert transformers.__version__ == '$(OLDEST)'"
	touch $@
