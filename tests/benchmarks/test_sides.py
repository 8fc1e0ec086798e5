"""Every side does the same work, and gives account of it."""

from pathlib import Path

import pytest
import torch

from benchmarks.engines.sides import DragomanEngine, Run, TransformersEngine, Workload, batches
from benchmarks.harness.random_text import random_texts
from dragoman.model.checkpoint import Checkpoint
from dragoman.server.engine.engine import Engine
from dragoman.server.engine.messages import SearchOptions
from dragoman.server.offline import OfflineTranslator

NUM_TOKENS = 6


def requests(checkpoint: Path, num_beams: int, count: int = 7) -> Workload:
    tokenizer = Checkpoint.load(checkpoint).tokenizers.byte_level()
    texts = [text for length in range(3, 3 + count) for text in random_texts(tokenizer, length, 1)]
    return Workload(texts, tokenizer.encode_batch(texts), num_beams, NUM_TOKENS)


def test_a_workload_starts_again_where_it_is_too_short() -> None:
    workload = Workload(["a", "b"], [[3], [4]], 1, 5)
    assert workload.first(5).texts == ["a", "b", "a", "b", "a"]
    assert workload.first(1).sources == [[3]]
    assert workload.first(3).max_new_tokens == 5


def test_rates_count_answers_and_their_tokens() -> None:
    run = Run(2.0, [[5, 6, 7], [8]], {})
    assert (run.tokens_per_second, run.sentences_per_second) == (2.0, 1.0)


def test_batches_hold_everything_once() -> None:
    assert [list(batch) for batch in batches([[1], [2], [3]], 2)] == [[[1], [2]], [[3]]]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_engine_answers_as_it_does_offline(endless: tuple[Path, Path], num_beams: int) -> None:
    checkpoint, bundle = endless
    workload = requests(checkpoint, num_beams)
    run = DragomanEngine(bundle, 1, 12).run(workload, 3)
    offline = OfflineTranslator(bundle, 12, 1)
    sources = [[*ids, offline.bundle.manifest.eos_id] for ids in workload.sources]
    found = offline.run(sources, NUM_TOKENS, SearchOptions(num_beams=num_beams, is_stopped_early=num_beams > 1))
    assert run.answers == [finished.answers[0].token_ids for finished in found]
    assert {len(answer) for answer in run.answers} == {NUM_TOKENS}
    assert run.seconds > 0


def test_the_engine_never_has_more_requests_than_asked_for(endless: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    step = Engine.step

    def observe(engine: Engine) -> None:
        numbers.append(engine.scheduler.num_waiting + engine.scheduler.num_running)
        step(engine)

    monkeypatch.setattr(Engine, "step", observe)
    checkpoint, bundle = endless
    DragomanEngine(bundle, 1, 8).run(requests(checkpoint, 1), 3)
    assert max(numbers) == 3 and numbers[:NUM_TOKENS] == [3] * NUM_TOKENS


@pytest.mark.parametrize("num_beams", [1, 3])
def test_transformers_gives_the_same_answers(endless: tuple[Path, Path], num_beams: int) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed")
    checkpoint, bundle = endless
    workload = requests(checkpoint, num_beams)
    num_threads = torch.get_num_threads()
    try:
        theirs = TransformersEngine(checkpoint, 1).run(workload, 2)
    finally:
        torch.set_num_threads(num_threads)
    assert theirs.answers == DragomanEngine(bundle, 1, 8).run(workload, 2).answers
