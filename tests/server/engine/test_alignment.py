"""Alignment of answers: that of the eager model's attention, whatever the search and whatever else runs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dragoman.export.tensors import ALIGNMENT_FLOOR
from dragoman.model.checkpoint import Checkpoint
from dragoman.server.engine.messages import GREEDY, Answer, Request, Sampling, SearchOptions
from tests.loop import Loop

ROOT = Path(__file__).resolve().parents[3]
SUBJECTS = ("A man", "Two young girls in red dresses", "The old dog", "A woman with a hat", "Three people", "He")
ENDS = ("is reading a book on a bench.", "walk along the beach.", "jumps over a fence while children watch", "sleeps.")
TEXTS = [f"{subject} {end}" for subject in SUBJECTS for end in ENDS]
SEARCHES = (
    GREEDY,
    SearchOptions(num_beams=4, num_answers=2),
    SearchOptions(num_answers=3, sampling=Sampling(5)),
    SearchOptions(num_answers=3, has_alternatives=True),
    SearchOptions(num_beams=2, no_repeat_ngram_size=2, repetition_penalty=1.3),
    SearchOptions(is_end_forced=True),
    SearchOptions(forced_prefix=[17, 33]),
    SearchOptions(num_beams=4, num_answers=2, terms=[[[330]], [[4914, 417], [2061]]]),
)


def expected(checkpoint: Checkpoint, translator: Loop, source: list[int], answer: Answer) -> list[int]:
    """The alignment by its definition, from attention of the eager model."""
    read = [checkpoint.model.config.decoder_start_id, *answer.token_ids]
    with torch.inference_mode():
        maps = checkpoint.model.observe(source, read if answer.reason == "eos" else read[:-1], has_maps=True).maps["cross"].numpy()
    total: NDArray[np.float32] = np.zeros((len(answer.token_ids), len(source) - 1), np.float32)
    for head in translator.manifest.alignment:
        weights = maps[head.layer, head.head, :, :-1]
        steps = np.minimum(np.arange(len(total)) + head.is_next, len(weights) - 1)
        total += np.log(weights[steps] / weights[steps].sum(1, keepdims=True) + ALIGNMENT_FLOOR)
    return total.argmax(1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("precision", "least"), [("fp32", 1.0), ("int8", 0.97)])
def test_tokens_are_aligned_as_by_the_attention_of_the_eager_model(
    shipped_bundle: Callable[..., Path], precision: str, least: float
) -> None:
    translator = Loop(shipped_bundle("en-de", precision), max_slots=16, num_threads=1)
    checkpoint = Checkpoint.load(ROOT / "model/pretrained/en-de")
    sources = [translator.source(text) for text in TEXTS]
    requests = [
        Request(
            i,
            source,
            5 if i % 5 == 4 else 40,
            0.0,
            search=SEARCHES[i % len(SEARCHES)],
            text_range=None if i % 4 == 3 else (0, len(source) - 1),
        )
        for i, source in enumerate(sources)
    ]
    finished = translator.run(requests)
    pairs: list[tuple[int, int]] = []
    for request in requests:
        for answer in finished[request.id].answers:
            if request.text_range is None:
                assert answer.alignment == []
            else:
                own = expected(checkpoint, translator, request.source_ids, answer)
                pairs += zip(answer.alignment, own, strict=True)
    assert len(pairs) > 200 and sum(a == b for a, b in pairs) >= least * len(pairs)
    alone = {}
    for request in requests:
        alone |= translator.run([request])
    assert {i: end.answers for i, end in alone.items()} == {i: end.answers for i, end in finished.items()}


def test_tokens_of_a_task_before_the_text_are_not_chosen(shipped_bundle: Callable[..., Path]) -> None:
    translator = Loop(shipped_bundle("en-de", "fp32"), max_slots=4, num_threads=1)
    ids = translator.source(TEXTS[0])
    ends = translator.run([Request(i, ids, 40, 0.0, text_range=span) for i, span in enumerate(((0, len(ids) - 1), (3, 5)))])
    whole, part = (ends[i].answers[0].alignment for i in (0, 1))
    assert len(whole) == len(part) and max(whole) > 1
    assert set(part) == {0, 1}, "counted from the start of the range"
