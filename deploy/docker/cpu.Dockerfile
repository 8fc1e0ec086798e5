# Dragoman for CPUs, from the root of the repository:
#   docker build -f deploy/docker/cpu.Dockerfile -t dragoman:0.1.0 .                            with the shipped models in /models
#   docker build -f deploy/docker/cpu.Dockerfile --target bare -t dragoman:0.1.0-bare .         without; mount bundles at /models
#   docker build -f deploy/docker/cpu.Dockerfile --build-arg PACKAGES=cpu-ray -t dragoman:0.1.0-ray .   nodes of a Ray cluster (deploy/ray)
# Build arguments: CHECKPOINTS (folders below model/pretrained to bake in), PRECISION, VERSION, REVISION, and pip's own PIP_INDEX_URL for a
# mirror, PIP_EXTRA_INDEX_URL for the stage that exports (docs/deploy.md). Every package of every stage has its checksum in
# deploy/docker/requirements-*.txt (make locks).
# It runs with a read-only root file system; only /tmp must be writable (docker run --read-only --tmpfs /tmp).
ARG PYTHON_IMAGE=docker.io/library/python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

# --- The wheel of this repository, and the tools that make it and the bill of materials.
FROM ${PYTHON_IMAGE} AS wheel
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY deploy/docker/requirements-build.txt /tmp/requirements.txt
RUN python -m venv /tools \
    && /tools/bin/pip install --require-hashes --only-binary :all: -r /tmp/requirements.txt
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY model ./model
COPY export ./export
COPY server ./server
COPY dragoman ./dragoman
COPY protos ./protos
RUN /tools/bin/pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /wheels .

# --- The server's packages: pinned, with checksums, without PyTorch.
FROM ${PYTHON_IMAGE} AS packages
ARG PIP_INDEX_URL
ARG PACKAGES=cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY deploy/docker/requirements-${PACKAGES}.txt /tmp/requirements.txt
COPY --from=wheel /wheels /tmp/wheels
RUN python -m venv /opt/dragoman \
    && /opt/dragoman/bin/pip install --require-hashes --only-binary :all: -r /tmp/requirements.txt \
    && /opt/dragoman/bin/pip install --no-deps --no-index /tmp/wheels/*.whl \
    && /opt/dragoman/bin/python -m pip check \
    && /opt/dragoman/bin/pip freeze --all > /opt/dragoman/packages.txt \
    && /opt/dragoman/bin/pip uninstall --yes pip setuptools \
    && /opt/dragoman/bin/python -m compileall -q /opt/dragoman/lib
# The bill of materials: every Python package, in CycloneDX. BuildKit's own (--sbom=true) has the packages of the base image.
COPY --from=wheel /tools /tools
RUN /tools/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
    --output-file /opt/dragoman/sbom.cdx.json /opt/dragoman/bin/python
RUN ["/opt/dragoman/bin/python", "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"]

# --- The shipped checkpoints, exported; the only stage with PyTorch, of which only the bundles are copied.
FROM ${PYTHON_IMAGE} AS bundles
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG CHECKPOINTS="en-de en-fr"
ARG PRECISION=fp32
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY deploy/docker/requirements-export.txt /tmp/requirements.txt
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --require-hashes --only-binary :all: -r /tmp/requirements.txt \
    && pip install --no-deps --no-index /tmp/wheels/*.whl \
    && pip check
COPY model/pretrained ./model/pretrained
RUN mkdir /models \
    && for name in ${CHECKPOINTS}; do \
      dragoman export --precision "${PRECISION}" "model/pretrained/${name}" "/models/${name}" || exit 1; done \
    && chmod -R a+rX /models

# --- The server.
FROM ${PYTHON_IMAGE} AS bare
ARG PYTHON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Dragoman" \
      org.opencontainers.image.description="A server for encoder-decoder Transformers, over gRPC and HTTP (CPU)" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
COPY --from=packages /opt/dragoman /opt/dragoman
COPY LICENSE /usr/share/doc/dragoman/LICENSE
RUN mkdir /models
# /tmp is the only writable folder.
ENV PATH=/opt/dragoman/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    DRAGOMAN_HOST=0.0.0.0 \
    DRAGOMAN_MODELS=/models
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080 8500 8501
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=6s --start-period=120s --retries=3 \
    CMD ["/opt/dragoman/bin/dragoman", "health", "--server", "127.0.0.1:8500"]
ENTRYPOINT ["/opt/dragoman/bin/dragoman"]
CMD ["serve"]

# --- The server with models.
FROM bare AS baked
COPY --from=bundles /models /models
