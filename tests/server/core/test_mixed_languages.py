"""Requests of different languages in one running batch of a real bundle: the bits of each alone, and PyTorch's answers."""

import asyncio
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dragoman.export.bundle import Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.server.core.frames import Frames
from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.core.scoring import PreparedPair, prepare_pair
from dragoman.server.core.validation import Prepared, Validator
from dragoman.server.engine.messages import Answer, Request
from dragoman.server.offline import OfflineTranslator
from dragoman.server.runtime.scorer import OnnxScorer
from tests.shelf import Shelf

LANGUAGES = Languages(
    source=[Language(code="en", source_prefix=[272]), Language(code="fr", source_suffix=[273])],
    target=[
        Language(code="de", target_prefix=[274]),
        Language(code="nl", source_prefix=[275], target_prefix=[276, 277]),
        Language(code="da", decoder_start_id=278),
    ],
    default_source="en",
    default_target="de",
)
TEMPLATE = Template(source_prefix=[279], task="{target}: ")
DEFAULTS = Defaults(num_beams=2, no_repeat_ngram_size=2, max_new_tokens=7, is_end_forced=True, length_penalty=0.7)
TEXTS = ["a dog", "over the grass", "grass", "the dog runs"]
PAIRS = list(itertools.product(["en", "fr"], ["de", "nl", "da"]))


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Checkpoint) -> Checkpoint:
    return Checkpoint("tongues", tiny_checkpoint.model, tiny_checkpoint.tokenizers, TEMPLATE, LANGUAGES, DEFAULTS)


@pytest.fixture(scope="module")
def bundle(checkpoint: Checkpoint, shelf: Shelf) -> Path:
    def make(folder: Path) -> None:
        checkpoint.save(folder / "checkpoint")
        export_checkpoint(folder / "checkpoint", folder / "bundle")

    return shelf.get("tongues", make) / "bundle"


class Bench:
    """A bundle, the core's way to its requests, and its engine."""

    def __init__(self, bundle: Path) -> None:
        self.translator = OfflineTranslator(bundle, max_slots=9, num_threads=1)
        opened = self.translator.bundle
        ids = itertools.count(1)
        self.model: Any = SimpleNamespace(
            name="tongues",
            manifest=opened.manifest,
            tokenizers=self.translator.tokenizers,
            frames=Frames(opened.manifest),
            engine=SimpleNamespace(next_id=lambda: next(ids)),
            max_slots_per_request=9,
        )

    def prepare(self, source: str, target: str, text: str, **fields: Any) -> Request:
        request = GenerateRequest(text=text, source_language=source, target_language=target, **fields)
        preparing = Validator().prepare(request, self.model, arrival=time.monotonic(), remaining_seconds=None, is_streamed=False)
        prepared: Prepared = asyncio.run(preparing)
        return prepared.request

    def pair(self, source: str, target: str, text: str, answer: str) -> PreparedPair:
        request = ScoreRequest(text=text, target=answer, source_language=source, target_language=target)
        preparing = prepare_pair(request, self.model, Validator(), arrival=time.monotonic(), remaining_seconds=None)
        return asyncio.run(preparing)

    def run(self, *requests: Request) -> dict[int, list[Answer]]:
        engine, found = self.translator.engine, dict[int, list[Answer]]()
        for request in requests:
            engine.submit(b"test", request)
        while engine.has_work:
            engine.step()
            for report in engine.take_reports().values():
                found |= {end.id: end.answers for end in report.finished}
        return found


@pytest.fixture(scope="module")
def bench(bundle: Path) -> Bench:
    return Bench(bundle)


def likeliest(model: Any, source: list[int], start: int, forced: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
    """Return the greedy answer, without end-of-sequence, and the log-probability of each generated token, the forced end's too."""
    config, tokens, log_probs = model.config, list(forced), list[float]()
    while True:
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[start, *tokens]]))[0, -1]
        logits[config.pad_id] = -torch.inf
        row = logits.log_softmax(-1)
        token = config.eos_id if len(log_probs) == max_new_tokens - 1 else int(row.argmax())
        log_probs.append(float(row[token]))
        if token == config.eos_id:
            return tokens, log_probs
        tokens.append(token)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@torch.inference_mode()
def test_answers_are_pytorchs_with_the_tokens_of_the_languages(
    bench: Bench, checkpoint: Checkpoint, source: str, target: str
) -> None:
    around: dict[str, tuple[list[int], list[int]]] = {"en": ([272], []), "fr": ([], [273])}
    before = {"de": [], "nl": [275], "da": []}[target]
    forced, start = {"de": ([274], 2), "nl": ([276, 277], 2), "da": ([], 278)}[target]
    assert checkpoint.model.config.decoder_start_id == 2
    for text in TEXTS:
        ids = checkpoint.tokenizers.source.encode(f"{target}: {text}")
        whole = [*before, *around[source][0], 279, *ids, checkpoint.model.config.eos_id, *around[source][1]]
        request = bench.prepare(source, target, text, num_beams=1, no_repeat_ngram_size=0)
        (answer,) = bench.run(request)[request.id]
        tokens, log_probs = likeliest(checkpoint.model, whole, start, forced, 7)
        assert answer.token_ids == tokens
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-4)
        assert answer.score == pytest.approx(sum(log_probs[:-1]) / (len(log_probs) + len(forced)) ** 0.7, abs=1e-4)


def test_a_score_is_the_log_probability_of_the_generated_token(bench: Bench, bundle: Path) -> None:
    scorer = OnnxScorer(Bundle.open(bundle), 1)
    scorer.check()
    scorer.open()
    for source, target in PAIRS:
        pair = bench.pair(source, target, "a dog", "the grass")
        words = bench.model.tokenizers.target.encode("the grass")
        request = bench.prepare(
            source, target, "a dog", num_beams=1, no_repeat_ngram_size=0, max_new_tokens=1, forced_prefix="the grass"
        )
        (answer,) = bench.run(request)[request.id]
        forced = bench.model.frames.find(source, target).target_prefix
        assert answer.token_ids == [*forced, *words] and pair.request.target_ids == [*answer.token_ids, 1]
        found = scorer.score(pair.request.source_ids, pair.request.target_ids, None, pair.request.decoder_start_id)[0]
        assert found[-1] == pytest.approx(answer.log_probs[0], abs=1e-4), "end-of-sequence, which was forced"
        assert len(pair.target_ids) == len(words) + 1
