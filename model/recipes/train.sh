#!/usr/bin/env bash
# Trains the shipped models: train.sh DATA. What comes of it are runs/en-de-shipped and runs/en-fr-shipped. Run it again after a break:
# nothing that is finished is trained or translated again. After a change of recipes or data, remove runs/ first.
# Needs eflomal-align (pip install eflomal), in PATH or where ALIGNER says.
set -euo pipefail
[[ $# == 1 ]] || { echo "usage: $0 DATA" >&2; exit 2; }
data=$1
dragoman=${DRAGOMAN:-dragoman}
aligner=${ALIGNER:-eflomal-align}
command -v "$aligner" >/dev/null || { echo "$aligner: no such program; pip install eflomal" >&2; exit 2; }
recipes=$(dirname "$0")

# train RECIPE DATA OUT OPTIONS...
train() { "$dragoman" train "$recipes/$1.toml" --data "$2" --output "$3" "${@:4}"; }

# take_best TARGET OUT CHECKPOINT...: the one that translates the validation text best.
take_best() {
  local checkpoint bleu best most=-1
  for checkpoint in "${@:3}"; do
    bleu=$("$dragoman" evaluate --checkpoint "$checkpoint" --source "$data/val.en.gz" --reference "$data/val.$1.gz" \
      --num-beams 5 --lowercase | awk '$1 == "BLEU" { print $2 }')
    [[ $bleu ]] || { echo "$checkpoint: dragoman evaluate gave no BLEU" >&2; exit 1; }
    if awk "BEGIN { exit !($bleu > $most) }"; then best=$checkpoint most=$bleu; fi
  done
  "$dragoman" average "$best" --output "$2" --force
}

# join TARGET OTHER TEXT OUT: a target's text, and each of its references with the English that the other target's sentence gave.
join() {
  mkdir -p "$4"
  { cat "$3-$1/train.en.gz"; cat "$3-$2"/{backward,sampled}.en | gzip; } >"$4/train.en.gz"
  { cat "$3-$1/train.$1.gz"; cat "$3-$1"/{original,original}."$1" | gzip; } >"$4/train.$1.gz"
  cp "$data/val.en.gz" "$data/val.$1.gz" "$4"
}

for target in de fr; do
  train "en-$target" "$data" "runs/en-$target"
  train "en-$target-r-drop" "$data" "runs/en-$target-r-drop" --initial-checkpoint "runs/en-$target"
  "$dragoman" average "runs/en-$target" "runs/en-$target-r-drop" --output "runs/en-$target-0" --force
done
for round in 1 2 3; do
  for target in de fr; do
    begin=runs/en-$target-$((round - 1)) back=runs/$target-en-$round
    train "$target-en" "$data" "$back" --initial-checkpoint "$begin"
    bash "$recipes/diversify.sh" "$begin" "$back" en "$target" "$data" "runs/text-$round-$target"
  done
  for pair in "de fr" "fr de"; do
    read -r target other <<<"$pair"
    text=runs/text-$round-$target/joined starts=("runs/en-$target-$((round - 1))")
    join "$target" "$other" "runs/text-$round" "$text"
    recipe=en-$target-diversified
    if [[ $round == 3 ]]; then
      train "en-$target-grown" "$text" "runs/en-$target-grown-3" --initial-checkpoint "${starts[0]}"
      recipe=en-$target-grown-r-drop starts+=("runs/en-$target-grown-3")
    fi
    end=runs/$recipe-$round mean=runs/en-$target-mean-$round
    train "$recipe" "$text" "$end" --initial-checkpoint "${starts[-1]}"
    "$dragoman" average "${starts[-1]}" "$end" --output "$mean" --force
    take_best "$target" "runs/en-$target-$round" "${starts[@]}" "$end" "$mean"
  done
done
for target in de fr; do
  text=runs/text-4-$target begin=runs/en-$target-3 end=runs/en-$target-rare
  mkdir -p "$text"
  [[ -e $text/rare.$target.gz ]] || "$dragoman" augment --source "$data/train.en.gz" --target "$data/train.$target.gz" \
    --source-language en --target-language "$target" --output-source "$text/rare.en.gz" --output-target "$text/rare.$target.gz" \
    --aligner "$aligner"
  for language in en "$target"; do
    cat "runs/text-3-$target/joined/train.$language.gz" "$text/rare.$language.gz" >"$text/train.$language.gz"
    cp "$data/val.$language.gz" "$text"
  done
  "$dragoman" add-tokens "$begin" "$data/train.en.gz" "$data/train.$target.gz" --vocab-size 10000 --output "$begin-tokens" --force
  train "en-$target-rare" "$text" "$end" --initial-checkpoint "$begin-tokens"
  take_best "$target" "runs/en-$target-4" "$begin" "$end"
  "$dragoman" average "runs/en-$target-4" --output "runs/en-$target-shipped" --half --force
done
