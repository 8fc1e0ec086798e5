"""The scripts that train the shipped models, run with a stand-in for `dragoman` that notes calls and marks its translations."""

import gzip
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "model" / "recipes"
STAND_IN = """#!/usr/bin/env bash
echo "$*" >> "$ASKED"
all=$* command=$1; shift
while [[ $# -gt 0 ]]; do
  case $1 in
    --in) in=$2 ;; --out | --output) out=$2 ;; --model) model=$2 ;;
    --output-source) rare_source=$2 ;; --output-target) rare_target=$2 ;;
    --sample) model=$model-sampled ;; --num-beams) model=$model-beam ;;
    --num-return-sequences) count=$2 ;; --reference) references=$2 ;;
  esac
  last=$1; shift
done
case $command in
  train | average | add-tokens) mkdir -p "$out"; echo "$all" >"$out/model.safetensors" ;;
  export) mkdir -p "$last"; touch "$last/bundle.json" ;;
  serve) [[ -z ${BROKEN-} ]] || { echo "no models" >&2; exit 2; }
    echo '{"event":"serving"}' >&2; trap 'echo drained >> "$ASKED"; exit 0' TERM; while :; do sleep 0.05; done ;;
  evaluate) [[ -z ${SILENT-} ]] || exit 0
    if [[ $all == *"$BEST"* ]]; then bleu=40.10; else bleu=9.50; fi
    printf "BLEU %s  nrefs:1\nchrF 60.00  nrefs:1\n" "$bleu" ;;
  translate) while read -r line; do for ((i = 0; i < ${count:-1}; i++)); do echo "$model: $line"; done; done <"$in" >"$out" ;;
  augment) echo "rare source" | gzip >"$rare_source"; echo "rare target" | gzip >"$rare_target" ;;
  nearest) sed "s/^/near /" "$references" > "$out" ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "data").mkdir()
    for language, words in (("en", b"one\ntwo"), ("de", b"eins\nzwei"), ("fr", b"un\ndeux")):
        (tmp_path / "data" / f"train.{language}.gz").write_bytes(gzip.compress(words))  # whose last line does not end
        (tmp_path / "data" / f"val.{language}.gz").write_bytes(gzip.compress(words + b"\n"))
    for name in ("forward", "backward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    program, asked = tmp_path / "dragoman", tmp_path / "asked"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    (tmp_path / "aligner").symlink_to(program)
    variables = {"DRAGOMAN": str(program), "ASKED": str(asked), "ALIGNER": str(tmp_path / "aligner")}

    def run(script: str, *arguments: object, **more: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        asked.write_text("")
        command = ["bash", RECIPES / script, *map(str, arguments)]
        environment = os.environ | variables | more
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
        return result, asked.read_text().splitlines()

    return run


def lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def test_stages_follow_each_other(run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    result, asked = run("train.sh", data, BEST="mean")
    assert result.returncode == 0, result.stderr
    made = (line.replace(f"{RECIPES}/", "") for line in asked if line.startswith(("train ", "average ", "add-tokens ")))
    stages = [line for line in made if re.search(r"(^|[ /])(en-fr|fr-en)", line)]
    assert len(stages) == 20
    assert stages[:3] == [
        f"train en-fr.toml --data {data} --output runs/en-fr",
        f"train en-fr-r-drop.toml --data {data} --output runs/en-fr-r-drop --initial-checkpoint runs/en-fr",
        "average runs/en-fr runs/en-fr-r-drop --output runs/en-fr-0 --force",
    ]
    assert stages[-7:] == [
        "train en-fr-grown-r-drop.toml --data runs/text-3-fr/joined --output runs/en-fr-grown-r-drop-3"
        " --initial-checkpoint runs/en-fr-grown-3",
        "average runs/en-fr-grown-3 runs/en-fr-grown-r-drop-3 --output runs/en-fr-mean-3 --force",
        "average runs/en-fr-mean-3 --output runs/en-fr-3 --force",
        f"add-tokens runs/en-fr-3 {data}/train.en.gz {data}/train.fr.gz --vocab-size 10000 --output runs/en-fr-3-tokens --force",
        "train en-fr-rare.toml --data runs/text-4-fr --output runs/en-fr-rare --initial-checkpoint runs/en-fr-3-tokens",
        "average runs/en-fr-3 --output runs/en-fr-4 --force",  # a round that translates no better counts for nothing
        "average runs/en-fr-4 --output runs/en-fr-shipped --half --force",
    ]
    joined, rare = tmp_path / "runs/text-3-de/joined", tmp_path / "runs/text-4-de"
    for language, word in (("en", "source"), ("de", "target")):  # the last text is the one before and that of rare words
        assert lines(rare / f"train.{language}.gz") == [*lines(joined / f"train.{language}.gz"), f"rare {word}"]


def test_failures_end_a_run_and_wrong_calls_print_the_usage(run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    result, _ = run("diversify.sh", "forward", "backward", "en", "de", data, tmp_path / "out", BROKEN="1")
    assert result.returncode != 0 and "no models" in result.stderr and not (tmp_path / "out" / "train.en.gz").exists()
    result, asked = run("train.sh", data, BEST="mean", SILENT="1")
    assert result.returncode != 0 and "no BLEU" in result.stderr and not any("runs/en-de-1 " in line for line in asked)
    result, asked = run("train.sh", data, BEST="mean", ALIGNER="no-such-aligner")
    assert (result.returncode, asked) == (2, []) and "no-such-aligner: no such program" in result.stderr
    for script in ("train.sh", "diversify.sh"):
        result, asked = run(script)
        assert (result.returncode, asked) == (2, []) and result.stderr.startswith("usage:")
