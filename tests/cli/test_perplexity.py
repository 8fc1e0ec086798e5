"""`dragoman perplexity`: what a checkpoint says of a text, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.architectures import network
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers

TEXT = ["a dog runs", "the grass"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a text, and checkpoints of a language model and of an rnn to which all tokens but padding are as likely."""
    tokenizer = ByteLevelTokenizer.train(TEXT * 5, 280)
    sizes = {"source_vocab_size": 280, "target_vocab_size": 280, "d_model": 8}
    sizes |= {"max_source_positions": 30, "max_target_positions": 40}
    for name, switches in {"decoder": {"num_heads": 2, "decoder_ffn_dim": 8}, "rnn": {"num_encoder_layers": 1}}.items():
        model = network(ModelConfig(architecture=name, num_decoder_layers=1, **sizes, **switches)).eval()
        with torch.no_grad():
            model.decoder.tokens.weight.zero_()
        Checkpoint(name, model, Tokenizers.shared(tokenizer)).save(tmp_path / name)
    for name, lines in {"text": TEXT, "blank": ["a dog", " "], "long": ["a dog", "z" * 40], "short": ["a dog"]}.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", ["decoder", "rnn"])
def test_what_cannot_be_told_apart_is_as_perplexing_as_the_vocabulary(run, folder: Path, name: str) -> None:
    source = ["--source", str(folder / "text")] if name == "rnn" else []
    asked = ["perplexity", "--checkpoint", str(folder / name), "--target", str(folder / "text"), *source]
    status, out, _ = run(*asked, "--json")
    found = json.loads(out)
    assert (status, found["num_lines"]) == (0, 2)
    assert found["perplexity"] == pytest.approx(279, rel=1e-4)
    assert found["loss"] == pytest.approx(math.log(279), rel=1e-4) == pytest.approx(-found["log_prob"] / found["num_tokens"])
    assert run(*asked)[1].startswith("perplexity 279.0")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "give exactly one of --checkpoint and --server"),
        ("--checkpoint {0}/decoder --server localhost:1", "give exactly one of --checkpoint and --server"),
        ("--checkpoint {0}/decoder --model x", "--model goes with --server"),
        ("--checkpoint {0}/decoder --to de", "--to goes with --server"),
        ("--checkpoint {0}/decoder --ca {0}/text", "--ca goes with --server"),
        ("--checkpoint {0}/decoder --server-name x", "--server-name goes with --server"),
        ("--checkpoint {0}/none", "{0}/none"),
        ("--checkpoint {0}/rnn", "line 1: there is no source"),
        ("--checkpoint {0}/decoder --target {0}/blank", "blank, line 2: "),
        ("--checkpoint {0}/decoder --target {0}/long", "line 2: 1 source and 42 target tokens, where the model takes 30 and 40"),
        ("--checkpoint {0}/decoder --source {0}/short", "short has 1 lines but "),
        ("--checkpoint {0}/decoder --source {0}/blank", "blank, line 2: "),
    ],
)
def test_what_cannot_be_asked_is_named(run, folder: Path, arguments: str, reason: str) -> None:
    told = arguments.format(folder).split()
    status, out, error = run("perplexity", *([] if "--target" in told else ["--target", str(folder / "text")]), *told)
    assert (status, out) == (2, "")
    assert reason.format(folder) in error
