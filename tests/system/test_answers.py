"""Answers of the shipped models, translation, recurrent and language models, are those of eager PyTorch."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.sync import Client
from tests.system.harness.oracle import Oracle, agree
from tests.system.harness.server import LONG, ROOT, Server, dragoman, serving

CHECKPOINTS = ROOT / "model/pretrained"
TEXTS = [
    "A man in a red shirt is standing in front of a building.",
    "Two dogs are playing in the snow.",
    "A woman with a black hat rides a bicycle down the street.",
    "Several children are sitting on the grass, and one of them laughs.",
]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def others(shipped_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the recurrent model and the language model."""
    models = tmp_path_factory.mktemp("models")
    for name in ("en-de-rnn", "en-captions"):
        (models / name).symlink_to(shipped_bundle(name))
    with serving(models) as running:
        yield running
        assert running.terminate() == 0


@pytest.fixture
def test_set(request: pytest.FixtureRequest) -> list[str]:
    """The English side of test_2016 in the long form; nothing in the short one."""
    if not LONG:
        return []
    with gzip.open(request.getfixturevalue("multi30k") / "test_2016_flickr.en.gz", "rt", encoding="utf-8") as lines:
        return lines.read().splitlines()


@pytest.mark.parametrize("model", ["en-de", "en-fr"])
def test_answers_are_pytorchs_at_any_concurrency(
    shared_server: Server, captions: list[str], test_set: list[str], model: str
) -> None:
    texts = test_set or (captions if model == "en-de" else captions[::4])
    with Client(shared_server.address) as client:
        together = [result.tokens for result in client.generate_many(texts, concurrency=64, model=model)]
        alone = [result.tokens for result in client.generate_many(texts, concurrency=1, model=model)]
        assert together == alone and len(together) == len(texts)
        oracle, few = Oracle(CHECKPOINTS / model), texts[::15]
        oracle.check_greedy(texts, together)
        options: dict[str, Any] = {"model": model, "num_beams": 4, "num_return_sequences": 4, "return_log_probs": True}
        for text, hypotheses in zip(few, oracle.beams(few, 4, 64), strict=True):
            answers = client.generate(text, max_new_tokens=64, length_penalty=1.0, **options).answers
            for answer, expected in zip(answers, hypotheses, strict=True):
                agree(answer, expected)


def test_streamed_pieces_are_the_unary_answer(shared_server: Server, captions: list[str]) -> None:
    with Client(shared_server.address) as client:
        for text in captions[:20]:
            whole = client.generate(text, model="en-fr")
            with client.stream(text, model="en-fr") as stream:
                pieces = list(stream)
            assert "".join(piece.text for piece in pieces) == whole.text
            assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens
            assert len(pieces) > 2, "text came before the end"


@pytest.mark.parametrize("text", ["Ein 🐕 läuft durch den Schnee.", "  two  spaces ", "</s> <pad> <s>", "e\u0301té \u200d \x00 ﷽"])
def test_any_text_is_answered(shared_server: Server, text: str) -> None:
    with Client(shared_server.address) as client:
        result = client.generate(text, model="en-de", max_new_tokens=20)
    assert result.finish_reason in ("eos", "length") and result.usage.generated_tokens <= 20


def test_evaluate_gives_the_same_scores_from_checkpoint_bundle_and_server(
    shared_server: Server, bundles: Path, captions: list[str], tmp_path: Path
) -> None:
    oracle, source, reference = Oracle(CHECKPOINTS / "en-de"), tmp_path / "source", tmp_path / "reference"
    source.write_text("\n".join(captions[:40]) + "\n")
    reference.write_text("\n".join(oracle.decode(found.ids) for found in oracle.greedy(captions[1:41], 256)) + "\n")
    sides = (
        ("--checkpoint", CHECKPOINTS / "en-de"),
        ("--bundle", bundles / "en-de"),
        ("--server", shared_server.address, "--model", "en-de"),
    )
    asked = ("--source", source, "--reference", reference, "--json")
    scores = [json.loads(dragoman("evaluate", *side, *asked).stdout) for side in sides]
    assert scores[0] == scores[1] == scores[2]
    assert 0 < scores[0]["bleu"] < 100 and "tok:13a" in scores[0]["bleu_signature"]


def test_the_recurrent_model_translates_as_pytorch_does_and_aligns(others: Server) -> None:
    oracle = Oracle(CHECKPOINTS / "en-de-rnn")
    with Client(others.address) as client:
        greedy = client.generate_many(TEXTS, model="en-de-rnn", max_new_tokens=64)
        assert [answer.text for answer in greedy] == [oracle.decode(found.ids) for found in oracle.greedy(TEXTS, 64)]
        beams = client.generate_many(TEXTS, model="en-de-rnn", max_new_tokens=64, num_beams=4)
        assert [answer.text for answer in beams] == [oracle.decode(found[0].ids) for found in oracle.beams(TEXTS, 4, 64)]
        found = client.score(TEXTS[1], "Zwei Hunde spielen im Schnee.", model="en-de-rnn", return_word_alignment=True)
    assert {"0-0", "1-1"} <= set(found.word_alignment.split()), found.word_alignment


def test_the_language_model_goes_on_as_pytorch_does(others: Server) -> None:
    oracle, prompts = Oracle(CHECKPOINTS / "en-captions"), ["", "A man", "Two dogs are", "A woman with a black hat rides a bicycle"]
    with Client(others.address) as client:
        answers = [client.generate(prompt, model="en-captions", max_new_tokens=40) for prompt in prompts]
    assert [list(answer.tokens) for answer in answers] == [found.ids for found in oracle.greedy(prompts, 40)]
    for prompt, answer in zip(prompts, answers, strict=True):
        [ids] = oracle.tokenizers.source.encode_batch([prompt])
        assert prompt + answer.text == oracle.decode([*ids, *answer.tokens]).strip()


def test_perplexity_from_the_server_is_pytorchs(others: Server, tmp_path: Path, test_set: list[str]) -> None:
    lines = test_set or TEXTS
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    sides = ("--server", others.address, "--model", "en-captions"), ("--checkpoint", CHECKPOINTS / "en-captions")
    by_server, by_pytorch = (
        json.loads(dragoman("perplexity", "--target", tmp_path / "text", "--json", *side).stdout) for side in sides
    )
    assert by_server["num_tokens"] == by_pytorch["num_tokens"] and by_server["num_lines"] == len(lines)
    assert by_server["perplexity"] == pytest.approx(by_pytorch["perplexity"], abs=1e-4)
    assert 2 < by_server["perplexity"] < 40
