"""A runner that computes nothing but notices everything.

Each row remembers what it was given, and the next token depends on all of it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from server.engine.engine import Engine
from server.engine.messages import Finished, Request
from server.engine.scheduler import Limits
from server.engine.search import Candidates

EOS, START, MAX_TARGET = 1, 2, 40
ORIGIN = b"front"


class FakeClock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def next_token(source: Sequence[int], history: Sequence[int]) -> int:
    """The fake model: a hash of the source and of everything decoded so far; the source's first id is the answer's length."""
    if len(history) >= source[0]:
        return EOS
    return 3 + hash((tuple(source), tuple(history))) % 1000


def expected_answer(source: Sequence[int], max_new_tokens: int) -> tuple[list[int], str]:
    """What greedy decoding must give, computed without any engine."""
    history = [START]
    for _ in range(max_new_tokens):
        token = next_token(source, history)
        if token == EOS:
            return history[1:], "eos"
        history.append(token)
    return history[1:], "length"


class FakeRunner:
    """See the module's docstring. `fail_next` makes the next call of that name raise."""

    device = "fake"

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.sources: list[tuple[int, ...]] = [()] * max_rows
        self.caches: list[list[int]] = [[] for _ in range(max_rows)]
        self.fail_next: str | None = None
        self.step_rows: list[int] = []
        self.prefill_batches: list[int] = []
        self.on_step: Callable[[], None] = lambda: None

    def _maybe_fail(self, name: str) -> None:
        if self.fail_next == name:
            self.fail_next = None
            raise RuntimeError(f"made to fail: {name}")

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        self._maybe_fail("prefill")
        assert len(set(rows)) == len(rows) == len(sources)
        self.prefill_batches.append(len(rows))
        for source, row in zip(sources, rows, strict=True):
            self.sources[row] = tuple(source)
            self.caches[row] = []

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        self._maybe_fail("step")
        assert len(tokens) == len(positions) <= self.max_rows
        self.on_step()
        self.step_rows.append(len(tokens))
        chosen = np.zeros((len(tokens), num_candidates), np.int64)
        for row, (token, position) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            assert position <= len(self.caches[row]), "a row skipped a position"
            self.caches[row][position:] = [token]
            chosen[row, 0] = next_token(self.sources[row], self.caches[row])
        return Candidates(chosen, np.zeros_like(chosen, np.float32))

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.sources[target] = self.sources[source]
        self.caches[target] = self.caches[source][:length]


class Bench:
    """An engine with a fake runner and a fake clock, and the ends of its requests."""

    def __init__(
        self, max_slots: int = 4, max_waiting_requests: int = 1000, max_waiting_tokens: int = 10_000, budget: int = 1000
    ) -> None:
        self.clock = FakeClock()
        self.runner = FakeRunner(max_slots)
        self.engine = Engine(
            self.runner,
            Limits(max_slots, max_waiting_requests, max_waiting_tokens, budget),
            eos_id=EOS,
            decoder_start_id=START,
            max_target_tokens=MAX_TARGET,
            clock=self.clock,
        )
        self.finished: dict[int, Finished] = {}
        self.streamed: dict[int, list[int]] = {}
        self.order: list[int] = []

    def submit(self, request_id: int, source: list[int], limit: int = MAX_TARGET, **fields: object) -> Request:
        request = Request(request_id, source, limit, self.clock.now, **fields)  # type: ignore[arg-type]
        self.engine.submit(ORIGIN, request)
        return request

    def step(self) -> None:
        self.engine.step()
        self.collect()

    def collect(self) -> None:
        for origin, report in self.engine.take_reports().items():
            assert origin == ORIGIN
            for tokens in report.tokens:
                assert tokens.id not in self.finished, "a token after the end"
                self.streamed.setdefault(tokens.id, []).extend(tokens.token_ids)
            for end in report.finished:
                assert end.id not in self.finished, "a request ended twice"
                self.finished[end.id] = end
                self.order.append(end.id)

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        self.collect()
        assert not self.engine.has_work
        assert self.engine.scheduler.num_used_slots == 0


@pytest.fixture
def bench() -> Bench:
    """Four slots."""
    return Bench()


@pytest.fixture(scope="session")
def make_bench() -> type[Bench]:
    """The class, for other sizes."""
    return Bench


@pytest.fixture(scope="session")
def answer_of() -> Callable[[Sequence[int], int], tuple[list[int], str]]:
    """See `expected_answer`."""
    return expected_answer
