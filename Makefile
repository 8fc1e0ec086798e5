# Each target sets up what it needs in .venv and touches nothing else on the machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SERVING := $(VENV)/.serving
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DATA   ?= data/multi30k
MODELS ?= en-de en-fr
BUNDLES ?= bundles
HOST   ?= 127.0.0.1
PORT   ?= 8500
HTTP_PORT ?= 8080
METRICS_PORT ?= 8501
WORKERS ?= auto

.PHONY: help setup serve demo export test test-long cuda-stub test-cuda-stub check format chart locks digests protos client train clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## Make .venv with the tested versions of everything

# What serving and exporting the shipped models need.
$(SERVING): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Dragoman needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[cpu,export]'
	touch $@

# What the tests and the checks need on top.
$(READY): $(SERVING)
	$(PIP) --editable '.[cpu,dev]'
	@# Helm's library asks for Python 3.12 and runs on 3.11; the chart's tests skip without it.
	-$(PIP) --ignore-requires-python --no-deps helm-sdkpy
	@# KServe's package pins an older protobuf, too: its models are read, and its client of inference is run, with what it needs.
	-$(PIP) --no-deps kserve
	-$(PIP) 'cloudevents<2' fastapi httpx orjson 'pandas<3' psutil
	@# Triton's client pins an older protobuf than ours and works with it; its stubs load in processes of their own.
	-$(PIP) --no-deps tritonclient python-rapidjson
	-$(PIP) geventhttpclient
	touch $@

serve: export ## Serve the shipped models (PORT, HTTP_PORT, METRICS_PORT, HOST)
	@echo "Serving on $(HOST):$(PORT), HTTP on $(HOST):$(HTTP_PORT), metrics on $(HOST):$(METRICS_PORT). In another terminal:"
	@echo "  $(BIN)/dragoman translate --server $(HOST):$(PORT) --model en-de 'A dog runs through the snow.'"
	@echo "  $(BIN)/dragoman models --server $(HOST):$(PORT)"
	$(BIN)/dragoman serve --models $(BUNDLES) --host $(HOST) --port $(PORT) \
	  --http-port $(HTTP_PORT) --metrics-port $(METRICS_PORT)

demo: export ## Serve in the background, translate, show the metrics that moved, stop
	PORT=$(PORT) HTTP_PORT=$(HTTP_PORT) METRICS_PORT=$(METRICS_PORT) BUNDLES=$(BUNDLES) MODELS="$(MODELS)" \
	  DRAGOMAN=$(BIN)/dragoman PYTHON=$(BIN)/python bash deploy/demo.sh

export: $(MODELS:%=$(BUNDLES)/%/bundle.json) ## Export the shipped checkpoints to ONNX bundles

$(BUNDLES)/%/bundle.json: $(SERVING) model/pretrained/%/model.safetensors model/pretrained/%/README.md
	rm -rf $(BUNDLES)/$*
	$(BIN)/dragoman export model/pretrained/$* $(BUNDLES)/$*

test: $(READY) ## Run the tests (WORKERS: how many at once, by default as many as there are cores)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

cuda-stub: $(READY) ## Unpack onnxruntime-gpu (256 MB) beside stub libraries for CUDA, in build/gpu_stub
	$(BIN)/python -m tests.system.cuda_stub.bed

test-long: export TEST_LONG = 1
test-long: test ## Run the tests in their long forms

test-cuda-stub: cuda-stub ## Run every graph on the real CUDA provider and a GPU that is none
	$(BIN)/python -m pytest tests/system/test_cuda_stub.py -rs

check: $(READY) ## Lint, type-check, and see that the generated stubs are up to date
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" bash protos/generate.sh --check
	$(BIN)/python deploy/blocking_client.py --check

format: $(READY) ## Format the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

chart: $(READY) ## Bring the tables of settings, metrics and values, and the Helm chart up to date
	$(BIN)/python -m deploy.prometheus.document
	$(BIN)/python deploy/helm/generate.py

locks: $(READY) ## Pin what the images install, with checksums
	bash deploy/docker/locks.sh $(BIN)/uv

digests: ## Renew the digests of the images that ours are built on (asks their registries)
	$(PYTHON) deploy/docker/digests.py

protos: $(READY) ## Generate the gRPC stubs
	PATH="$(CURDIR)/$(BIN):$$PATH" bash protos/generate.sh

client: $(READY) ## Generate the blocking client from the one for asyncio, and the keywords of search options
	$(BIN)/python deploy/blocking_client.py

train: $(READY) ## Train the shipped models again (DATA: where Multi30k lies); takes hours on a CPU
	$(PIP) eflomal
	DRAGOMAN=$(BIN)/dragoman ALIGNER=$(BIN)/eflomal-align bash model/recipes/train.sh "$(DATA)"

clean: ## Remove .venv, caches and bundles; training runs stay
	rm -rf $(VENV) $(BUNDLES) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
