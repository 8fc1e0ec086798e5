#!/usr/bin/env bash
# Make the environments of the servers that benchmarks/serving.py compares with: setup.sh DIR [triton] [mosec] [litserve]
#
# Without names, all of them. Triton's Python backend is linked against a system's libpython: its environment is made with
# /usr/bin/python3 (Debian: apt install python3-venv libpython3-dev), the others with python3. PYTHON names another interpreter.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: $0 DIR [triton] [mosec] [litserve]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
directory=$1
shift
[ $# -gt 0 ] || set -- triton mosec litserve

for peer in "$@"; do
    requirements=$here/requirements-$peer.txt
    if [ ! -f "$requirements" ]; then
        echo "$0: no peer is called $peer" >&2
        exit 2
    fi
done
for peer in "$@"; do
    python=${PYTHON:-$([ "$peer" = triton ] && echo /usr/bin/python3 || echo python3)}
    "$python" -m venv --clear "$directory/$peer"
    "$directory/$peer/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/requirements-$peer.txt"
    echo "$directory/$peer is ready"
done
