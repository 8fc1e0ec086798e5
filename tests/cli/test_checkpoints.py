"""`dragoman attention` and `perplexity` of checkpoints: what they write, and what they refuse."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from tests.cli.conftest import assert_refused
from tests.model.conftest import small_network

Run = Callable[..., tuple[int, str, str]]


def save(folder: Path, is_even: bool = False, **switches: object) -> Path:
    """Write a small checkpoint whose answers do not end, or one to which all tokens but padding are as likely."""
    tokenizer = ByteLevelTokenizer.train(["a dog runs over the grass"], 280)
    sizes = {"source_vocab_size": 280, "target_vocab_size": 280, "has_output_bias": not is_even}
    model = small_network(**sizes | {"max_source_positions": 100, "max_target_positions": 100} | switches)
    with torch.no_grad():
        if is_even:
            model.decoder.tokens.weight.zero_()
        else:
            model.decoder.output_bias[model.config.eos_id] = -1e4
    Checkpoint("small", model, Tokenizers.shared(tokenizer)).save(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    rnn = {"architecture": "rnn", "num_encoder_layers": 1}
    even = {"is_even": True, "num_decoder_layers": 1, "max_source_positions": 30, "max_target_positions": 40}
    return {
        "transformer": save(folder / "transformer", num_encoder_layers=3),
        "decoder": save(folder / "decoder", architecture="decoder"),
        "rnn": save(folder / "rnn", **rnn),
        "wide": save(folder / "wide", num_encoder_layers=16, num_heads=16),
        "blind": save(folder / "blind", **rnn, attention="none"),
        "even_decoder": save(folder / "even_decoder", architecture="decoder", **even),
        "even_rnn": save(folder / "even_rnn", **rnn, **even),
    }


def test_attention_has_every_head_that_is_asked_for(run_command: Run, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    output, picture = tmp_path / "a.html", tmp_path / "a.png"
    output.write_text("what was there")
    for name, options, expected in (
        ("transformer", "", {"encoder": 12, "decoder": 8, "cross": 8}),
        ("decoder", "", {"decoder": 8}),
        ("rnn", "", {"cross": 1}),
        ("transformer", "--kind cross --kind decoder", {"decoder": 8, "cross": 8}),
        ("transformer", "--kind cross --layer 1", {"cross": 4}),
    ):
        asked = ("attention", "--checkpoint", checkpoints[name], "a dog", "a dog runs", *options.split(), "--output")
        wrote = f"{sum(expected.values())} maps of model small\n"
        assert run_command(*asked, output) == (0, f"wrote {output}: {wrote}", "")
        page = output.read_text(encoding="utf-8")
        found = re.findall(r'data-kind="(\w+)"', page)
        assert {kind: found.count(kind) for kind in dict.fromkeys(found)} == expected
    titles = re.findall(r"<title>([^<]*)</title>", page)[1:]
    assert titles == [f"Cross-attention, layer 1, head {head}" for head in range(4)]
    assert run_command(*asked, picture) == (0, f"wrote {picture}: {wrote}", "")
    with Image.open(picture) as image:
        assert image.format == "PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.png"]
    asked = ("attention", "--checkpoint", checkpoints["rnn"], "a dog", "--output", output, "--max-new-tokens", 5)
    assert run_command(*asked)[2] == "dragoman: The answer did not end within 5 tokens; it is cut there.\n"
    assert "it is cut there" in output.read_text()


def test_attention_that_cannot_be_drawn_is_named(run_command: Run, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    words = {name: " ".join(["dog"] * count) for name, count in (("long", 100), ("middling", 64), ("short", 20))}
    for command, output, named in (
        ("{blind} a", "png", "the model has no attention to look at"),
        ("{rnn} ''", "html", "source: is empty"),
        ("{rnn} a --kind encoder", "html", "--kind encoder: model small has no encoder self-"),
        ("{decoder} a --layer 2", "html", "--layer 2: model small has the layers 0 to 1"),
        ("{transformer} '{long}'", "html", "source: 101 tokens, end-of-sequence included, where"),
        ("{transformer} a '{long}'", "html", "target: 101 tokens, end-of-sequence included, where"),
        ("{decoder} a '{long}'", "html", "where the model takes 99 after this source"),
        ("{transformer} '{middling}' a", "png", "source: 65 tokens; a picture shows 64 at most"),
        ("{decoder} '{short}'", "png", "source and target together: 84 tokens; a picture shows"),
        ("{wide} a b", "png", "320 heads; a picture shows 256 at most: --kind and --layer choose less"),
    ):
        arguments = [argument.format(**checkpoints, **words) for argument in shlex.split(command)]
        assert_refused(run_command("attention", "--checkpoint", *arguments, "--output", tmp_path / f"out.{output}"), named)
        assert list(tmp_path.iterdir()) == []


def test_tokens_that_are_as_likely_are_as_perplexing_as_their_number(
    run_command: Run, checkpoints: dict[str, Path], files: Path
) -> None:
    (files / "long").write_text(f"a dog\n{'z' * 40}\n")
    for name, source in (("even_decoder", ()), ("even_rnn", ("--source", files / "more"))):
        asked = ("perplexity", "--checkpoint", checkpoints[name], "--target", files / "two", *source)
        code, out, _ = run_command(*asked, "--json")
        found = json.loads(out)
        assert (code, found["num_lines"], found["perplexity"]) == (0, 2, pytest.approx(279, rel=1e-4))
        assert found["loss"] == pytest.approx(math.log(279), rel=1e-4) == pytest.approx(-found["log_prob"] / found["num_tokens"])
        assert run_command(*asked)[1].startswith("perplexity 279.0")
    for name, text, named in (
        ("even_rnn", "two", "line 1: there is no source"),
        ("even_decoder", "long", "line 2: 1 source and 42 target tokens, where the model takes 30 and 40"),
    ):
        assert_refused(run_command("perplexity", "--checkpoint", checkpoints[name], "--target", files / text), named)
