#!/usr/bin/env bash
# Writes the Python stubs of the .proto files in dragoman/v1 and dragoman/inference. With --check, fails where those committed differ.
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
