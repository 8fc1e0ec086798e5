#!/usr/bin/env bash
# Multiplies the training text by translating it (data diversification, Nguyen et al., 2020): each source with that one of the forward
# model's translations that is nearest to the target (Kim and Rush, 2016), each target with the backward model's. Only the training text is
# read; the validation text is copied as it is.
# FORWARD and BACKWARD are checkpoints; OUT becomes a data folder with the names that Multi30k's has.
set -euo pipefail
[[ $# == 6 ]] || { echo "usage: $0 FORWARD BACKWARD SOURCE_LANGUAGE TARGET_LANGUAGE DATA OUT" >&2; exit 2; }
forward=$1 backward=$2 source=$3 target=$4 data=$5 out=$6
dragoman=${DRAGOMAN:-dragoman}
export DRAGOMAN_SERVER=127.0.0.1:${PORT:-8500} no_proxy=127.0.0.1${no_proxy:+,$no_proxy}
mkdir -p "$out"

# What an earlier run left is of use where it was made in the same way with the same models and text.
cksum "$0" "$forward/model.safetensors" "$backward/model.safetensors" "$data/train.$source.gz" "$data/train.$target.gz" >"$out/inputs.new"
cmp -s "$out/inputs.new" "$out/inputs" || rm -rf "$out"/{bundles,beams.*,drawn.*,forward.*,backward.*,sampled.*}
mv "$out/inputs.new" "$out/inputs"

for model in forward backward; do
  [[ -e $out/bundles/$model/bundle.json ]] && continue
  "$dragoman" export "${!model}" "$out/bundles/$model"
done
: >"$out/server.log"  # an earlier run's would tell that this one's server serves
"$dragoman" serve --models "$out/bundles" --host 127.0.0.1 --port "${PORT:-8500}" --http false --metrics-host 127.0.0.1 --metrics-port 0 \
  --log-format json --log-level info 2>"$out/server.log" &
server=$!
trap 'kill -TERM "$server" 2>/dev/null; wait "$server" || true' EXIT
until grep -q '"event":"serving"' "$out/server.log"; do
  kill -0 "$server" 2>/dev/null || { cat "$out/server.log" >&2; exit 1; }
  sleep 0.2
done

# translate FROM TO OPTIONS...: a file that is there already is whole; it is from a run that was cut off later.
translate() {
  [[ -s $2 ]] || "$dragoman" translate --in "$1" --out "$2" --timeout 600 --min-new-tokens 2 "${@:3}"
}
gunzip -c "$data/train.$source.gz" | awk 1 >"$out/original.$source"  # a last line that does not end would grow by the next file's first
gunzip -c "$data/train.$target.gz" | awk 1 >"$out/original.$target"
if [[ ! -s $out/forward.$target ]]; then
  translate "$out/original.$source" "$out/beams.$target" --model "$source-$target" --num-beams 8 --num-return-sequences 8
  translate "$out/original.$source" "$out/drawn.$target" --model "$source-$target" --sample --top-k 20 --num-return-sequences 8
  "$dragoman" nearest "$out"/{beams,drawn}."$target" --reference "$out/original.$target" --output "$out/forward.$target"
fi
translate "$out/original.$target" "$out/backward.$source" --model "$target-$source" --num-beams 5
translate "$out/original.$target" "$out/sampled.$source" --model "$target-$source" --sample --top-k 10 --temperature 0.8

cat "$out"/{original,original,backward,sampled}."$source" | gzip >"$out/train.$source.gz"
cat "$out"/{original,forward,original,original}."$target" | gzip >"$out/train.$target.gz"
cp "$data/val.$source.gz" "$data/val.$target.gz" "$out"
