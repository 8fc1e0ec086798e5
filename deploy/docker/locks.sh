#!/usr/bin/env bash
# Writes requirements-cpu.txt and requirements-cuda.txt: what the images install, by the versions of constraints.txt, with the checksums
# of every file that may be installed. Takes the path of uv.
set -euo pipefail
uv=$(realpath "${1:-$(command -v uv)}")
cd "$(dirname "$0")/../.."

lock() {
  kind=$1
  shift
  file=deploy/docker/requirements-$kind.txt
  echo "# Written by make locks: what the $kind image installs, with checksums." >"$file.tmp"
  "$uv" pip compile --quiet pyproject.toml "$@" --constraint constraints.txt --python-version 3.11 --generate-hashes \
    --no-annotate --no-header --no-emit-index-url >>"$file.tmp"
  mv "$file.tmp" "$file"
}

lock cpu --extra cpu --extra tracing
# NVIDIA's libraries are published for this platform only.
lock cuda --extra gpu --extra tracing --python-platform x86_64-manylinux_2_28
