#!/usr/bin/env bash
# All stages of one shipped model, into runs/: train.sh en-de DATA. Run it again after a break: finished stages end at once.
# Of runs/en-de-diversified and runs/en-de-final, take what translates the validation text better (dragoman evaluate).
set -euo pipefail
[[ $# == 2 && $1 == *-* ]] || { echo "usage: $0 SOURCE-TARGET DATA" >&2; exit 2; }
model=$1 data=$2 source=${1%-*} target=${1#*-}
dragoman=${DRAGOMAN:-dragoman}
recipes=$(dirname "$0")

train() { "$dragoman" train "$recipes/$1.toml" --data "$2" --output "runs/$1"; }
train "$model" "$data"
train "$model-r-drop" "$data"
"$dragoman" average "runs/$model" "runs/$model-r-drop" --output "runs/$model-mean" --force
train "$target-$source" "$data"
bash "$recipes/diversify.sh" "runs/$model-mean" "runs/$target-$source" "$source" "$target" "$data" "runs/$model-text"
train "$model-diversified" "runs/$model-text"
"$dragoman" average "runs/$model-mean" "runs/$model-diversified" --output "runs/$model-final" --force
