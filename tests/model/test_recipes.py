"""The scripts that train the shipped models, run with a stand-in for `dragoman` that notes calls and marks what it translates."""

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
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for language, words in (("en", "one two"), ("de", "eins zwei"), ("fr", "un deux")):
        for part in ("train", "val"):
            (folder / f"{part}.{language}.gz").write_bytes(gzip.compress("".join(f"{word}\n" for word in words.split()).encode()))
    return folder


@pytest.fixture
def run(tmp_path: Path, data: Path):
    """Run a script in an empty folder and return its result and what it asked of the stand-in."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "dragoman").write_text(STAND_IN)
    (tmp_path / "dragoman").chmod(0o755)
    (tmp_path / "aligner").symlink_to(tmp_path / "dragoman")
    asked = tmp_path / "asked"

    def run(script: str, *arguments: object, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        asked.write_text("")
        result = subprocess.run(
            ["bash", RECIPES / script, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ
            | {"DRAGOMAN": str(tmp_path / "dragoman"), "ASKED": str(asked), "ALIGNER": str(tmp_path / "aligner")}
            | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return result, asked.read_text().splitlines()

    return run


@pytest.fixture
def diversify(run, data: Path, tmp_path: Path):
    """Run diversify.sh for English and German."""
    for name in ("forward", "backward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    return lambda out, **environment: run("diversify.sh", "forward", "backward", "en", "de", data, out, **environment)


def lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


@pytest.mark.parametrize("is_ended", [True, False])
def test_diversified_text_is_parallel(diversify, data: Path, tmp_path: Path, is_ended: bool) -> None:
    """Also where a file's last line does not end."""
    out = tmp_path / "out"
    if not is_ended:
        for language, text in (("en", b"one\ntwo"), ("de", b"eins\nzwei")):
            (data / f"train.{language}.gz").write_bytes(gzip.compress(text))
    result, asked = diversify(out)
    assert result.returncode == 0, result.stderr
    assert list(zip(lines(out / "train.en.gz"), lines(out / "train.de.gz"), strict=True)) == [
        ("one", "eins"),
        ("two", "zwei"),
        ("one", "near eins"),
        ("two", "near zwei"),
        ("de-en-beam: eins", "eins"),
        ("de-en-beam: zwei", "zwei"),
        ("de-en-sampled: eins", "eins"),
        ("de-en-sampled: zwei", "zwei"),
    ]
    for language in ("en", "de"):
        assert lines(out / f"val.{language}.gz") == lines(data / f"val.{language}.gz")
    assert asked[-1] == "drained"
    assert f"nearest {out}/beams.de {out}/drawn.de --reference {out}/original.de --output {out}/forward.de" in asked
    for name, model in (("beams", "en-de-beam"), ("drawn", "en-de-sampled")):
        assert (out / f"{name}.de").read_text().splitlines() == [f"{model}: one"] * 8 + [f"{model}: two"] * 8


def test_what_was_translated_before_a_break_is_kept(diversify, tmp_path: Path) -> None:
    out = tmp_path / "out"
    diversify(out)
    (out / "forward.de").write_text("kept\nkept too\n")
    (out / "backward.en").unlink()
    result, asked = diversify(out)
    assert result.returncode == 0, result.stderr
    assert lines(out / "train.de.gz")[2:4] == ["kept", "kept too"]
    assert [line.split("--out ")[1].split()[0] for line in asked if "--out " in line] == [f"{out}/backward.en"]
    assert not any(line.startswith("export") for line in asked)


@pytest.mark.parametrize("changed", ["forward/model.safetensors", "backward/model.safetensors", "data/train.de.gz"])
def test_what_was_translated_with_another_model_or_of_another_text_is_not(diversify, tmp_path: Path, changed: str) -> None:
    out = tmp_path / "out"
    diversify(out)
    (out / "forward.de").write_text("old\nold too\n")
    (tmp_path / changed).write_bytes(gzip.compress(b"drei\nvier\n"))
    result, asked = diversify(out)
    assert result.returncode == 0, result.stderr
    references = ("drei", "vier") if changed.endswith(".gz") else ("eins", "zwei")
    assert lines(out / "train.de.gz")[2:4] == [f"near {reference}" for reference in references]
    made = {line.split("--out ")[1].split()[0] for line in asked if "--out " in line}
    assert made == {f"{out}/{name}" for name in ("beams.de", "drawn.de", "backward.en", "sampled.en")}
    assert sum(line.startswith("export") for line in asked) == 2


def test_a_server_that_does_not_start_ends_it(diversify, tmp_path: Path) -> None:
    result, _ = diversify(tmp_path / "out", BROKEN="1")
    assert result.returncode != 0
    assert "no models" in result.stderr
    assert not (tmp_path / "out" / "train.en.gz").exists()


def test_stages_follow_each_other(run, data: Path) -> None:
    result, asked = run("train.sh", data, BEST="mean")
    assert result.returncode == 0, result.stderr
    made = (line.replace(f"{RECIPES}/", "") for line in asked if line.startswith(("train ", "average ", "add-tokens ")))
    stages = [line for line in made if re.search(r"(^|[ /])(en-fr|fr-en)", line)]
    assert stages[:3] == [
        f"train en-fr.toml --data {data} --output runs/en-fr",
        f"train en-fr-r-drop.toml --data {data} --output runs/en-fr-r-drop --initial-checkpoint runs/en-fr",
        "average runs/en-fr runs/en-fr-r-drop --output runs/en-fr-0 --force",
    ]
    for begin, end, stage in (0, 1, stages[3:7]), (1, 2, stages[7:11]), (2, 3, stages[11:16]):
        text = f"--data runs/text-{end}-fr/joined"
        recipe, beginning = "en-fr-diversified", f"runs/en-fr-{begin}"
        grown = []
        if end == 3:
            recipe, beginning = "en-fr-grown-r-drop", "runs/en-fr-grown-3"
            grown = [f"train en-fr-grown.toml {text} --output runs/en-fr-grown-3 --initial-checkpoint runs/en-fr-2"]
        assert stage == [
            f"train fr-en.toml --data {data} --output runs/fr-en-{end} --initial-checkpoint runs/en-fr-{begin}",
            *grown,
            f"train {recipe}.toml {text} --output runs/{recipe}-{end} --initial-checkpoint {beginning}",
            f"average {beginning} runs/{recipe}-{end} --output runs/en-fr-mean-{end} --force",
            f"average runs/en-fr-mean-{end} --output runs/en-fr-{end} --force",
        ]
        assert f"export runs/en-fr-{begin} runs/text-{end}-fr/bundles/forward" in asked
        assert f"export runs/fr-en-{end} runs/text-{end}-fr/bundles/backward" in asked
    assert stages[16:] == [
        f"add-tokens runs/en-fr-3 {data}/train.en.gz {data}/train.fr.gz --vocab-size 10000 --output runs/en-fr-3-tokens --force",
        "train en-fr-rare.toml --data runs/text-4-fr --output runs/en-fr-rare --initial-checkpoint runs/en-fr-3-tokens",
        "average runs/en-fr-3 --output runs/en-fr-4 --force",  # what translates no better than the third round counts for nothing
        "average runs/en-fr-4 --output runs/en-fr-shipped --half --force",
    ]


def test_each_round_goes_on_with_what_translates_the_validation_text_best(run, data: Path) -> None:
    result, asked = run("train.sh", data, BEST="runs/en-de-diversified")
    assert result.returncode == 0, result.stderr
    for end in (1, 2):
        assert f"average runs/en-de-diversified-{end} --output runs/en-de-{end} --force" in asked
    measured = f"--source {data}/val.en.gz --reference {data}/val.de.gz --num-beams 5 --lowercase"
    assert f"evaluate --checkpoint runs/en-de-mean-1 {measured}" in asked


@pytest.mark.parametrize("begin", [0, 1, 2, 3])
def test_a_round_that_makes_it_worse_counts_for_nothing(run, data: Path, begin: int) -> None:
    """Neither do those in which the model grows and in which it sees rare words."""
    result, asked = run("train.sh", data, BEST=f"runs/en-de-{begin} ")
    assert result.returncode == 0, result.stderr
    assert f"average runs/en-de-{begin} --output runs/en-de-{begin + 1} --force" in asked


def test_an_evaluation_without_figures_ends_it(run, data: Path) -> None:
    result, asked = run("train.sh", data, BEST="mean", SILENT="1")
    assert result.returncode != 0 and "no BLEU" in result.stderr
    assert not any("runs/en-de-1 " in line for line in asked)


def test_a_missing_aligner_is_noticed_before_anything_is_trained(run, data: Path) -> None:
    result, asked = run("train.sh", data, BEST="mean", ALIGNER="no-such-aligner")
    assert (result.returncode, asked) == (2, [])
    assert "no-such-aligner: no such program" in result.stderr


def test_the_other_language_gives_more_english(run, data: Path, tmp_path: Path) -> None:
    result, _ = run("train.sh", data, BEST="mean")
    assert result.returncode == 0, result.stderr
    text = tmp_path / "runs" / "text-1-de" / "joined"
    pairs = list(zip(lines(text / "train.en.gz"), lines(text / "train.de.gz"), strict=True))
    assert pairs[:2] == [("one", "eins"), ("two", "zwei")]
    assert pairs[8:] == [
        ("fr-en-beam: un", "eins"),
        ("fr-en-beam: deux", "zwei"),
        ("fr-en-sampled: un", "eins"),
        ("fr-en-sampled: deux", "zwei"),
    ]
    for language in ("en", "de"):
        assert lines(text / f"val.{language}.gz") == lines(data / f"val.{language}.gz")


def test_the_last_text_is_the_one_before_and_that_of_rare_words(run, data: Path, tmp_path: Path) -> None:
    """The text of rare words is made once, with the aligner that is named."""
    result, asked = run("train.sh", data, BEST="mean")
    assert result.returncode == 0, result.stderr
    runs = tmp_path / "runs"
    before = [lines(runs / "text-3-de" / "joined" / f"train.{language}.gz") for language in ("en", "de")]
    assert [lines(runs / "text-4-de" / f"train.{language}.gz") for language in ("en", "de")] == [
        [*before[0], "rare source"],
        [*before[1], "rare target"],
    ]
    for language in ("en", "de"):
        assert lines(runs / "text-4-de" / f"val.{language}.gz") == lines(data / f"val.{language}.gz")
    augmented = [line for line in asked if line.startswith("augment") and "train.de.gz" in line]
    assert augmented == [
        f"augment --source {data}/train.en.gz --target {data}/train.de.gz --source-language en --target-language de "
        f"--output-source runs/text-4-de/rare.en.gz --output-target runs/text-4-de/rare.de.gz --aligner {tmp_path}/aligner"
    ]
    _, asked = run("train.sh", data, BEST="-rare ")
    assert not any(line.startswith("augment") for line in asked)
    assert "average runs/en-de-rare --output runs/en-de-4 --force" in asked


@pytest.mark.parametrize("script", ["train.sh", "diversify.sh"])
def test_a_wrong_call_tells_the_right_one(run, script: str) -> None:
    result, asked = run(script)
    assert (result.returncode, asked) == (2, [])
    assert result.stderr.startswith("usage:")
