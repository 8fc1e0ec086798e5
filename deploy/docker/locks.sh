#!/usr/bin/env bash
# Writes requirements-*.txt: what each stage of the images installs, by the versions of constraints.txt, with the checksums of every file
# that may be installed. Takes the path of uv.
set -euo pipefail
uv=$(realpath "${1:-$(command -v uv)}")
cd "$(dirname "$0")/../.."

# lock NAME WHAT SOURCE [OPTIONS]
lock() {
  name=$1 what=$2
  shift 2
  file=deploy/docker/requirements-$name.txt
  echo "# Written by make locks: what $what installs, with checksums." >"$file.tmp"
  "$uv" pip compile --quiet "$@" --constraint constraints.txt --python-version 3.11 --generate-hashes \
    --no-annotate --no-header --no-emit-index-url >>"$file.tmp"
  mv "$file.tmp" "$file"
}

lock cpu "the cpu image" pyproject.toml --extra cpu --extra tracing --extra stores --extra detect
# NVIDIA's libraries are published for this platform only.
lock cuda "the cuda image" pyproject.toml --extra gpu --extra tracing --extra stores --extra detect --python-platform x86_64-manylinux_2_28
# With PACKAGES=cpu-ray or cuda-ray: nodes of a Ray cluster.
lock cpu-ray "the cpu image with Ray" pyproject.toml --extra cpu --extra ray
lock cuda-ray "the cuda image with Ray" pyproject.toml --extra gpu --extra ray --python-platform x86_64-manylinux_2_28
# PyTorch has other dependencies on other platforms.
lock export "the stage that exports" pyproject.toml --extra cpu --extra export --universal
# The build system of pyproject.toml, and the tool for the bill of materials.
lock build "the stage that makes the wheel" deploy/docker/requirements-build.in --universal
