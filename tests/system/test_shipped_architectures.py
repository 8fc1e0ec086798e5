"""The shipped recurrent model and language model, exported and served: what PyTorch says of the same text, they say."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.sync import Client
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_lines, write_lines
from dragoman.model.decode import beam_search, greedy_search

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("en-de-rnn", "en-captions")
TEXTS = [
    "A man in a red shirt is standing in front of a building.",
    "Two dogs are playing in the snow.",
    "A woman with a black hat rides a bicycle down the street.",
    "Several children are sitting on the grass, and one of them laughs.",
]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(
    shipped_bundle: Callable[..., Path], serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    for name in MODELS:
        (models / name).symlink_to(shipped_bundle(name))
    with serve(models) as running:
        yield running


def dragoman(*arguments: str) -> str:
    """Run the command line; return what it prints."""
    command = [sys.executable, "-m", "dragoman", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_recurrent_model_translates_as_pytorch_does(server: Any) -> None:
    checkpoint = Checkpoint.load(ROOT / "model/pretrained/en-de-rnn")
    ids = checkpoint.tokenizers.source.encode_batch(TEXTS)
    greedy = [found.ids for found in greedy_search(checkpoint.model, ids, 64)]
    beams = [found[0].ids for found in beam_search(checkpoint.model, ids, 4, 64)]
    with Client(server.address) as client:
        for oracle, options in ((greedy, {}), (beams, {"num_beams": 4})):
            answers = client.generate_many(TEXTS, model="en-de-rnn", max_new_tokens=64, **options)
            assert [answer.text for answer in answers] == [checkpoint.tokenizers.target.decode(each) for each in oracle]


def test_the_recurrent_model_aligns_what_it_translates(server: Any) -> None:
    with Client(server.address) as client:
        found = client.score(TEXTS[1], "Zwei Hunde spielen im Schnee.", model="en-de-rnn", return_word_alignment=True)
    assert {"0-0", "1-1"} <= set(found.word_alignment.split()), found.word_alignment


def test_the_language_model_goes_on_as_pytorch_does(server: Any) -> None:
    checkpoint = Checkpoint.load(ROOT / "model/pretrained/en-captions")
    prompts = ["", "A man", "Two dogs are", "A woman with a black hat rides a bicycle"]
    ids = checkpoint.tokenizers.source.encode_batch(prompts)
    oracle = [found.ids for found in greedy_search(checkpoint.model, ids, 40)]
    with Client(server.address) as client:
        answers = [client.generate(prompt, model="en-captions", max_new_tokens=40) for prompt in prompts]
    assert [list(answer.tokens) for answer in answers] == oracle
    for prompt, answer, found in zip(prompts, answers, ids, strict=True):
        assert prompt + answer.text == checkpoint.tokenizers.target.decode([*found, *oracle[prompts.index(prompt)]]).strip()


@pytest.mark.parametrize("is_corpus", [False, True], ids=["some captions", "test_2016"])
def test_perplexity_from_the_server_is_pytorchs(
    server: Any, tmp_path: Path, request: pytest.FixtureRequest, is_corpus: bool
) -> None:
    lines = read_lines(request.getfixturevalue("multi30k") / "test_2016_flickr.en.gz") if is_corpus else TEXTS
    write_lines(tmp_path / "text.en", lines)
    asked = ("perplexity", "--target", str(tmp_path / "text.en"), "--json")
    by_server = json.loads(dragoman(*asked, "--server", server.address, "--model", "en-captions"))
    by_pytorch = json.loads(dragoman(*asked, "--checkpoint", "model/pretrained/en-captions"))
    assert by_server["num_tokens"] == by_pytorch["num_tokens"] and by_server["num_lines"] == len(lines)
    assert by_server["perplexity"] == pytest.approx(by_pytorch["perplexity"], abs=1e-4)
    assert 2 < by_server["perplexity"] < 40
