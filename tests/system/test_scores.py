"""Scores of the real server: those of PyTorch and of generation, at any load."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.scoring import Score
from dragoman.client.sync import Client
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import greedy_search
from tests.system.harness.server import ROOT, dragoman, wait_until

pytestmark = pytest.mark.e2e


def test_the_score_of_an_answer_is_that_of_greedy_search(shared_server: Any, captions: list[str]) -> None:
    """A few answers are tokenised otherwise than they were generated, which is no fault: those are not compared."""
    texts = captions[:60]
    checkpoint = Checkpoint.load(ROOT / "model/pretrained/en-de")
    oracle = greedy_search(checkpoint.model, checkpoint.tokenizers.source.encode_batch(texts), 256)
    with Client(shared_server.address) as client:
        answers = list(client.generate_many(texts, model="en-de"))
        scores = [client.score(text, answer.text, model="en-de") for text, answer in zip(texts, answers, strict=True)]
    num_compared = 0
    for score, hypothesis in zip(scores, oracle, strict=True):
        if [token.token for token in score.tokens] == [*hypothesis.ids, checkpoint.model.config.eos_id]:
            num_compared += 1
            assert [token.log_prob for token in score.tokens] == pytest.approx(hypothesis.log_probs, abs=1e-4)
            assert score.score == pytest.approx(hypothesis.score, abs=1e-4)
    assert num_compared >= 54


def test_scores_are_bit_identical_whatever_the_load(shared_server: Any, captions: list[str]) -> None:
    pairs = list(pairwise(captions[:31]))
    with Client(shared_server.address) as client, ThreadPoolExecutor(16) as threads:

        def score(pair: tuple[str, str]) -> Score:
            return client.score(*pair, model="en-de", return_alignment=True, request_id="same")

        alone = [score(pair) for pair in pairs]
        generating = threads.submit(lambda: list(client.generate_many(captions, model="en-de")))
        together = list(threads.map(score, reversed(pairs)))
        assert len(generating.result()) == len(captions)
    assert together == alone[::-1]


@pytest.mark.parametrize(
    ("model", "source", "target", "links"),
    [
        ("en-de", "Two men play soccer on a field.", "Zwei Männer spielen Fußball auf einem Feld.", "1-1 2-2 3-3 6-6"),
        ("en-de", "A dog runs through the snow.", "Ein Hund rennt durch den Schnee.", "1-1 2-2 5-5"),
        ("en-fr", "A little girl in a pink dress.", "Une petite fille en robe rose.", "1-1 2-2 6-4"),
    ],
)
def test_translated_words_are_linked(shared_server: Any, model: str, source: str, target: str, links: str) -> None:
    """Nouns, verbs and numbers; articles and prepositions attend anywhere. French puts the colour behind the dress."""
    with Client(shared_server.address) as client:
        score = client.score(source, target, model=model, return_word_alignment=True, return_alignment=True)
    assert score.word_alignment is not None and score.alignment is not None
    found = set(score.word_alignment.split())
    assert len(found) == len(target.split())
    assert found >= set(links.split())
    assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in score.alignment.weights)


def test_a_better_translation_has_a_better_score(shared_server: Any) -> None:
    source = "A dog runs through the snow."
    with Client(shared_server.address) as client:
        good, odd, empty = (
            client.score(source, target, model="en-de").score
            for target in ("Ein Hund rennt durch den Schnee.", "Eine Katze schläft auf dem Sofa.", "")
        )
    assert good > odd and good > empty


def test_command_line_scores_two_files(shared_server: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("A dog runs through the snow.\nTwo men play soccer on a field.\n")
    target.write_text("Ein Hund rennt durch den Schnee.\n\n")
    files = ("--source", source, "--target", target, "--alignment")
    lines = dragoman("score", "--server", shared_server.address, "--model", "en-de", *files).stdout.splitlines()
    (score, log_prob, links), (empty_score, empty_log_prob, no_links) = (line.split("\t") for line in lines)
    assert float(log_prob) < float(score) < 0 and "0-0" in links.split()
    assert float(empty_score) == float(empty_log_prob) < float(log_prob) and no_links == ""


def test_scored_pairs_are_counted(shared_server: Any) -> None:
    labels = {"model": "en-fr", "finish_reason": "scored"}
    before = shared_server.metric("dragoman_request_success_total", **labels)
    with Client(shared_server.address) as client:
        client.score("A dog.", "Un chien.", model="en-fr")
    assert shared_server.metric("dragoman_request_success_total", **labels) == before + 1


def test_a_model_scores_when_its_bundle_has_gone(serve: Any, endless: Path, tmp_path: Path) -> None:
    """As for generation, everything is loaded at the start: the first pair reads nothing."""
    bundle = tmp_path / "alpha"
    shutil.copytree(endless / "alpha", bundle)
    with serve(bundle) as server, Client(server.address) as client:
        wait_until(lambda: bool(server.logged("scorer loaded")), "the scorer is loaded")
        bundle.rename(tmp_path / "away")
        assert client.score("a dog runs", "over the grass").log_prob < 0
        assert server.terminate() == 0
