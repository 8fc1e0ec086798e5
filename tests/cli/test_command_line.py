"""The command line given what it cannot use: one line on standard error, and an exit code that says whose fault it was."""

import gzip
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dragoman.cli import main as dragoman

PATIENCE_SECONDS = 120
NOBODY = "127.0.0.1:1"

TRAINING = """
name = "tiny"
data = { source = "source", target = "target", validation_source = "source", validation_target = "target" }
tokenizer = { vocab_size = 300 }
[model]
d_model = 16
num_heads = 2
num_encoder_layers = 1
num_decoder_layers = 1
encoder_ffn_dim = 16
decoder_ffn_dim = 16
[training]
max_steps = 1000000
"""


def is_one_line(text: str) -> bool:
    return text.startswith("dragoman: ") and text.count("\n") == 1 and text.endswith("\n")


AUGMENT = "--source {0}/two --target {0}/more --source-language en --output-source {0}/out --output-target {0}/out2"
BAD = {
    "no such command": ("translat", "translat"),
    "no such flag": ("translate --loud hello", "--loud"),
    "flag without value": ("translate hello --model", "--model"),
    "flag value of another kind": ("translate --concurrency many hello", "--concurrency"),
    "flag value out of range": ("translate --max-new-tokens 0 hello", "--max-new-tokens"),
    "too many arguments": ("models here there", "here"),
    "endless timeout": ("translate --timeout inf hello", "--timeout"),
    "empty address": ("translate --server= hello", "--server"),
    "token that no header can hold": ("translate --token=ä hello", "--token"),
    "missing authority": ("translate --ca {0}/nowhere hello", "nowhere"),
    "authority that is none": ("translate --ca {0}/two hello", "{0}/two"),
    "fewer targets than sources": ("score --source {0}/two --target {0}/one", "{0}/two has 2 lines but {0}/one has 1"),
    "targets that are not there": ("score --source {0}/two --target {0}/nowhere", "{0}/nowhere"),
    "layer of no alignment": ("score --source {0}/two --target {0}/two --alignment-layer 1", "--alignment-layer"),
    "streamed JSON": ("translate --stream --json hello", "--json"),
    "streamed n-best": ("translate --stream --num-beams 4 --num-return-sequences 2 hello", "--stream"),
    "streamed scores": ("translate --stream --scores hello", "--stream"),
    "log-probabilities in lines": ("translate --log-probs hello", "--json"),
    "beams out of range": ("translate --num-beams 0 hello", "--num-beams"),
    "streamed file": ("translate --stream --in {0}/two --out {0}/out", "--stream"),
    "in without out": ("translate --in {0}/two", "--out"),
    "out without in": ("translate --out {0}/out hello", "--in"),
    "in and texts": ("translate --in {0}/two --out {0}/out hello", "not both"),
    "resumed without a file": ("translate --resume hello", "--resume"),
    "certificate without its key": ("translate --ca {0}/two --certificate {0}/two hello", "--certificate is given without --key"),
    "key without its certificate": ("models --ca {0}/two --key {0}/two", "--key is given without --certificate"),
    "certificate without an authority": ("score --source {0}/two --target {0}/two --certificate a --key b", "go with --ca"),
    "name of a server without TLS": ("health --server-name a.example", "go with --ca"),
    "requests beyond measure": ("translate --concurrency 100000 hello", "--concurrency"),
    "source of a score that is blank": ("score --source {0}/blank --target {0}/two", "{0}/blank, line 2"),
    "missing file to translate": ("translate --in {0}/nowhere --out {0}/out", "{0}/nowhere"),
    "folder to translate": ("translate --in {0}/folder --out {0}/out", "{0}/folder"),
    "folder to write to": ("translate --in {0}/two --out {0}/folder", "{0}/folder"),
    "file that is not UTF-8": ("translate --in {0}/latin1 --out {0}/out", "{0}/latin1, line 2"),
    "missing source": ("evaluate --source {0}/nowhere --reference {0}/two --bundle {0}/bundle", "{0}/nowhere"),
    "no translator": ("evaluate --source {0}/two --reference {0}/two", "exactly one"),
    "two translators": ("evaluate --source {0}/two --reference {0}/two --bundle {0} --checkpoint {0}", "exactly one"),
    "line counts that differ": ("evaluate --source {0}/two --reference {0}/one --bundle {0}/bundle", "2 lines"),
    "empty source": ("evaluate --source {0}/empty --reference {0}/two --bundle {0}/bundle", "{0}/empty"),
    "blank line": ("evaluate --source {0}/two --reference {0}/blank --bundle {0}/bundle", "{0}/blank, line 2"),
    "length penalty without beams": (
        "evaluate --source {0}/two --reference {0}/two --bundle {0} --length-penalty 2",
        "--num-beams",
    ),
    "model for a bundle": ("evaluate --source {0}/two --reference {0}/two --bundle {0}/bundle --model en-de", "--model"),
    "certificates for a bundle": (
        "evaluate --source {0}/two --reference {0}/two --bundle {0}/bundle --certificate {0}/two",
        "--certificate goes with --server",
    ),
    "certificate without its key for an evaluation": (
        "evaluate --source {0}/two --reference {0}/two --server a --ca {0}/two --certificate {0}/two",
        "--certificate is given without --key",
    ),
    "missing checkpoint to evaluate": (
        "evaluate --source {0}/two --reference {0}/two --checkpoint {0}/nowhere",
        "{0}/nowhere/config.json",
    ),
    "missing bundle to evaluate": ("evaluate --source {0}/two --reference {0}/two --bundle {0}/nowhere", "{0}/nowhere"),
    "corrupt bundle to evaluate": ("evaluate --source {0}/two --reference {0}/two --bundle {0}/bundle", "bundle.json"),
    "corrupt checkpoint to evaluate": ("evaluate --source {0}/two --reference {0}/two --checkpoint {0}/damaged", "config.json"),
    "nothing to choose from": ("nearest --reference {0}/two --output {0}/out", "CANDIDATES"),
    "missing candidates": ("nearest {0}/nowhere --reference {0}/two --output {0}/out", "{0}/nowhere"),
    "candidates of other sentences": ("nearest {0}/two {0}/one --reference {0}/two --output {0}/out", "{0}/one: 1 lines"),
    "language without determiners": (f"augment {AUGMENT} --target-language fi", "'fi'"),
    "aligner that is not there": (f"augment {AUGMENT} --target-language de --aligner {{0}}/nowhere", "{0}/nowhere"),
    "output in the place of its input": (f"augment {AUGMENT} --target-language de --output-target {{0}}/two", "four files"),
    "text without its translation": ("augment --source {0}/two --target {0}/one --source-language en", "--target-language"),
    "checkpoint that would be replaced": ("average {0}/bundle --output {0}/model", "{0}/model"),
    "nothing to average": ("average --output {0}/out", "CHECKPOINT"),
    "missing checkpoint to average": ("average {0}/nowhere --output {0}/out", "{0}/nowhere"),
    "tokens for a checkpoint that would be replaced": (
        "add-tokens {0}/bundle {0}/two --output {0}/model --vocab-size 300",
        "{0}/model",
    ),
    "tokens for a missing checkpoint": ("add-tokens {0}/nowhere {0}/two --output {0}/out --vocab-size 300", "{0}/nowhere"),
    "missing checkpoint": ("export {0}/nowhere {0}/out", "{0}/nowhere"),
    "corrupt checkpoint": ("export {0}/checkpoint {0}/out", "config.json"),
    "output that is taken": ("export {0}/checkpoint {0}/bundle", "{0}/bundle"),
    "number format that is none": ("export {0}/checkpoint {0}/out --precision int1", "int1"),
    "training configuration that is none": ("train {0}/two", "{0}/two"),
    "device that is none": ("train {0}/two --device abacus", "abacus"),
    "no bundles": ("serve --models {0}/folder", "{0}/folder"),
    "corrupt bundle": ("serve --models {0}/bundle", "bundle.json"),
    "unknown setting in the file": ("serve --config {0}/unknown.toml", "{0}/unknown.toml"),
    "missing settings": ("serve --config {0}/nowhere", "{0}/nowhere"),
    "unknown setting": ("serve --models {0}/bundle --max-slotz 4", "max_slotz"),
    "setting without value": ("serve --models {0}/bundle --max-slots", "--max-slots"),
    "argument that is no setting": ("serve --models {0}/bundle stray", "stray"),
    "port that is none": ("serve --models {0}/bundle --port 99999", "--port"),
    "port that is no number": ("serve --models {0}/bundle --port http", "--port"),
}


@pytest.mark.parametrize(("command", "named"), BAD.values(), ids=BAD)
def test_what_cannot_be_used_is_named_in_one_line(run, files: Path, command: str, named: str) -> None:
    code, out, err = run(*command.format(files).split())
    assert (code, out) == (2, "")
    assert is_one_line(err) and named.format(files) in err
    assert not (files / "out").exists()


def test_a_language_that_a_model_does_not_write_is_named(run, files: Path) -> None:
    shipped = Path(__file__).parents[2] / "model" / "pretrained" / "en-de"
    code, out, err = run("export", shipped, files / "out", "--target-language", "fr")
    assert (code, out) == (2, "") and is_one_line(err)
    assert "--target-language: the model has no 'fr'; it has de" in err
    assert not (files / "out").exists()


def test_the_nearest_candidates_are_written(run, files: Path) -> None:
    (files / "more").write_text("the cow\na dog\ncats\na cat\n")
    output = files / "nearest.gz"
    assert run("nearest", files / "two", files / "more", "--reference", files / "two", "--output", output)[0] == 0
    assert gzip.decompress(output.read_bytes()) == b"a dog\na cat\n"


def test_a_text_of_which_nothing_can_be_made_is_named(run, files: Path) -> None:
    aligner = files / "aligner"
    aligner.write_text('#!/bin/sh\nprintf "\\n\\n" >"$6"; cp "$6" "$8"\n')
    aligner.chmod(0o755)
    code, _, err = run("augment", *AUGMENT.format(files).split(), "--target-language", "de", "--aligner", aligner)
    assert code == 2 and is_one_line(err) and f"nothing can be made of {files}/two" in err
    assert not (files / "out").exists()


def test_text_for_rare_words_is_parallel(run, files: Path) -> None:
    """A stand-in for the aligner links each word with the one at its place."""
    colours = ["red", "green", "white", "grey", "brown"] * 12
    (files / "en").write_text("".join(f"The {colour}{i} dog{i} sleeps here.\n" for i, colour in enumerate(colours)))
    (files / "de").write_text("".join(f"Der {colour}{i} Hund{i} schläft hier.\n" for i, colour in enumerate(colours)))
    aligner = files / "aligner"
    aligner.write_text('#!/bin/sh\nsed \'s/.*/0-0 1-1 2-2 3-3 4-4 5-5/\' "$2" | tee "$6" >"$8"\n')
    aligner.chmod(0o755)
    options = ["--source-language", "en", "--target-language", "de", "--output-source", files / "more.en.gz"]
    options += ["--output-target", files / "more.de", "--copies", 2, "--phrases", 1, "--aligner", aligner]
    code, out, _ = run("augment", "--source", files / "en", "--target", files / "de", *options)
    assert code == 0 and "120 sentences" in out
    english = gzip.decompress((files / "more.en.gz").read_bytes()).decode().splitlines()
    german = (files / "more.de").read_text().splitlines()
    assert len(german) > 120
    for source, target in zip(english, german, strict=True):
        assert re.findall(r"\d+", source) == re.findall(r"\d+", target)


def test_an_output_that_cannot_be_written_is_named(run, files: Path) -> None:
    (files / "training.toml").write_text(TRAINING.replace("1000000", "1"))
    for name in ("source", "target"):
        (files / name).write_text("a dog runs\n" * 9)
    code, _, err = run("train", files / "training.toml", "--output", files / "two", "--device", "cpu")
    assert code == 2 and is_one_line(err) and str(files / "two") in err


def test_training_goes_on_from_the_checkpoint_that_the_command_names(run, files: Path) -> None:
    for name in ("source", "target"):
        (files / name).write_text("a dog runs\n" * 9)
    train = ["train", files / "training.toml", "--device", "cpu", "--threads", 1]
    (files / "training.toml").write_text(TRAINING.replace("1000000", "1"))
    assert run(*train, "--output", files / "first")[0] == 0
    (files / "training.toml").write_text(TRAINING.replace("1000000", "1\nseed = 2\nlearning_rate = 1e-9"))
    assert run(*train, "--output", files / "second", "--initial-checkpoint", files / "first")[0] == 0
    assert run(*train, "--output", files / "other")[0] == 0
    first, second, other = (load_file(files / name / "model.safetensors") for name in ("first", "second", "other"))
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    assert not all(torch.allclose(first[name], other[name], atol=1e-6) for name in first)
    code, _, err = run(*train, "--output", files / "third", "--initial-checkpoint", files / "nowhere")
    assert code == 2 and is_one_line(err) and str(files / "nowhere") in err


def test_a_bug_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is somebody else's fault becomes a line."""
    for error in (ValueError("bug"), ModuleNotFoundError("bug", name="bug"), TimeoutError("bug")):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(dragoman, "app", fail)
        with pytest.raises(type(error), match="bug"):
            dragoman.main()


def test_interrupted_training_says_no_more_than_how_it_went(start, files: Path) -> None:
    (files / "training.toml").write_text(TRAINING)
    for name in ("source", "target"):
        (files / name).write_text("a dog runs\n" * 9)
    process = start("train", files / "training.toml", "--output", files / "out", "--device", "cpu", "--threads", "1")
    end = time.monotonic() + PATIENCE_SECONDS
    while not (files / "out/training/steps.csv").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert all(re.match(r"dragoman: (warning: |tiny: )", line) for line in err.decode().splitlines())
