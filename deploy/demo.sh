#!/usr/bin/env bash
# Serves the bundles in the background, translates with both models, shows which metrics moved, and stops the server cleanly.
set -euo pipefail
dragoman=${DRAGOMAN:-dragoman}
port=${PORT:-8500}
metrics_port=${METRICS_PORT:-8501}
log=$(mktemp)

"$dragoman" serve --models "${BUNDLES:-bundles}" --host 127.0.0.1 --port "$port" --metrics-port "$metrics_port" 2>"$log" &
pid=$!
stop() {
  status=$?
  kill -TERM "$pid" 2>/dev/null || true
  if ! wait "$pid" || [ "$status" != 0 ]; then
    echo "something went wrong; the server's log:" >&2
    cat "$log" >&2
    status=1
  fi
  rm -f "$log"
  exit "$status"
}
trap stop EXIT

export DRAGOMAN_SERVER=127.0.0.1:$port
sentences=('A dog runs through the snow.' 'Two men in hard hats are talking on a street.' 'A young girl in a red dress is playing the guitar.')
echo "== Models"
"$dragoman" models --wait 60
for model in en-de en-fr; do
  echo; echo "== $model"
  "$dragoman" translate --model "$model" "${sentences[@]}"
  echo; echo "== $model, streamed"
  "$dragoman" translate --model "$model" --stream 'A group of people is standing in front of an old building.'
done
echo; echo "== Metrics that moved (of http://127.0.0.1:$metrics_port/metrics)"
python3 - "http://127.0.0.1:$metrics_port/metrics" <<'PYTHON'
import sys
import urllib.request

for line in urllib.request.urlopen(sys.argv[1]).read().decode().splitlines():
    if line.startswith("dragoman_") and not line.endswith(" 0.0") and "_bucket{" not in line and "_created" not in line:
        print(line)
PYTHON
echo; echo "== Stopping"
