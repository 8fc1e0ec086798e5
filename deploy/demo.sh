#!/usr/bin/env bash
# Serves the bundles in the background, translates with each model, shows which metrics moved, and stops the server cleanly.
set -euo pipefail
dragoman=${DRAGOMAN:-dragoman}
python=${PYTHON:-python3}  # needs nothing but the standard library
port=${PORT:-8500}
http_port=${HTTP_PORT:-8080}
metrics_port=${METRICS_PORT:-8501}
export DRAGOMAN_SERVER=127.0.0.1:$port
export no_proxy=127.0.0.1${no_proxy:+,$no_proxy}
log=$(mktemp)

"$dragoman" serve --models "${BUNDLES:-bundles}" --host 127.0.0.1 --port "$port" \
  --http-port "$http_port" --metrics-port "$metrics_port" --log-format json --log-level info 2>"$log" &
pid=$!
stop() {
  status=$?
  kill -TERM "$pid" 2>/dev/null || true
  wait "$pid" || status=$((status ? status : $?))
  case $status in
    0 | 129 | 130 | 143) ;;  # done, or interrupted
    *) echo "something went wrong; the server's log:" >&2; cat "$log" >&2 ;;
  esac
  rm -f "$log"
  exit "$status"
}
trap stop EXIT

# Not by asking the port: another server may have it.
until grep -q '"event":"serving"' "$log"; do
  kill -0 "$pid" 2>/dev/null || exit 1
  sleep 0.2
done
echo "== Models"
"$dragoman" models
echo "The models that come with Dragoman know short descriptions of everyday scenes, such as those below, and no other text:"
echo "what they make of a greeting or a headline is nonsense. It says nothing about the server, which answers as its model does."
for model in ${MODELS:-en-de en-fr}; do
  echo; echo "== $model"
  "$dragoman" translate --model "$model" 'A dog runs through the snow.' 'Two men in hard hats are talking on a street.' \
    'A young girl in a red dress is playing the guitar.'
  echo; echo "== $model, streamed"
  "$dragoman" translate --model "$model" --stream 'A group of people is standing in front of an old building.'
done
echo; echo "== Over HTTP (POST http://127.0.0.1:$http_port/v1/generate)"
"$python" - "http://127.0.0.1:$http_port/v1/generate" ${MODELS:-en-de en-fr} <<'PYTHON'
import json
import sys
import urllib.request

for model in sys.argv[2:]:
    message = json.dumps({"model": model, "text": "A dog runs through the snow."}).encode()
    request = urllib.request.Request(sys.argv[1], message, {"Content-Type": "application/json"})
    print(json.load(urllib.request.urlopen(request, timeout=60))["text"])
PYTHON
echo; echo "== Metrics that moved (of http://127.0.0.1:$metrics_port/metrics)"
"$python" - "http://127.0.0.1:$metrics_port/metrics" <<'PYTHON'
import sys
import urllib.request

for line in urllib.request.urlopen(sys.argv[1], timeout=10).read().decode().splitlines():
    if line.startswith("dragoman_") and not line.endswith(" 0.0") and "_bucket{" not in line and "_created" not in line:
        print(line)
PYTHON
echo; echo "== Stopping"
