#!/usr/bin/env bash
# Writes what is made of the .proto files: the Python stubs in dragoman/v1 and dragoman/inference, and the OpenAPI document of the HTTP
# API. With --check, fails where what is committed differs.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.
if [ "${1:-}" = --check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
python -m grpc_tools.protoc --proto_path=protos --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  dragoman/v1/generation.proto dragoman/v1/repository.proto dragoman/inference/inference.proto
if [ "$out" != . ]; then
  for stub in "$out"/dragoman/*/*_pb2*; do
    diff -q "$stub" "${stub#"$out"/}" || { echo "stubs are out of date: run make protos" >&2; exit 1; }
  done
fi
PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" python protos/openapi.py "$@"
