"""A device without memory for a batch of sources: only those that do not fit alone are refused."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from dragoman.server.engine.engine import Engine
from dragoman.server.engine.messages import Finished, Request
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.target import TargetSide


class SmallRunner:
    """Encodes one source at a time, of 5 tokens at the most, and always answers with end-of-sequence."""

    device = "small"
    max_rows = 4
    holder = None
    reader = None
    graphs = None
    memory: Mapping[str, int] = MappingProxyType({})

    def prefill(self, sources: list[list[int]], rows: list[int]) -> None:
        if len(sources) > 1 or len(sources[0]) > 5:
            raise MemoryError

    def step(self, tokens: np.ndarray, positions: np.ndarray, num_candidates: int) -> Candidates:
        return Candidates(np.ones((len(tokens), 1), np.int64), np.zeros((len(tokens), 1), np.float32))

    def look(self, tokens: np.ndarray, positions: np.ndarray, num_candidates: int, first_row: int) -> Candidates:
        raise AssertionError("plain requests look at nothing")

    def copy_row(self, source: int, target: int, length: int) -> None: ...

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None: ...

    def cache_bytes(self) -> tuple[int, int]:
        return 0, 0


def test_only_sources_that_do_not_fit_alone_are_refused_and_the_engine_goes_on() -> None:
    engine = Engine(SmallRunner(), Limits(4, 100, 1000, 1000), TargetSide(10, 1, 2, 20), clock=lambda: 0.0)
    finished: dict[int, Finished] = {}
    for number, length in enumerate([5, 6, 4, 6, 6, 6, 6, 6, 5]):
        engine.submit(b"", Request(number, [3] * length, 4, 0.0))
    while engine.has_work:
        engine.step()
        finished |= {end.id: end for report in engine.take_reports().values() for end in report.finished}
    reasons = [finished[number].reason for number in range(9)]
    assert reasons == ["eos", "queue_full", "eos", *["queue_full"] * 5, "eos"]
    assert all(end.retry_after_seconds > 0 for end in finished.values() if end.reason == "queue_full"), "it says when to come back"
