"""An engine on a fake model and a fake clock, and a reference for what any search must answer.

The fake model is a pure function: the next token's log-probabilities follow from the source and all tokens fed. The runner gets
these tokens from its caches alone, where only what was written or copied is there, so that a wrong row, position or range shows in
the answers. The reference computes the same answers from the definitions, with whole vocabularies and without caches, batches or
an engine.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from dragoman.server.engine.engine import Engine
from dragoman.server.engine.messages import Answer, Finished, Request
from dragoman.server.engine.search.hypothesis import TargetSide
from dragoman.server.engine.settings import Limits
from dragoman.server.runtime.runner import Candidates, Held
from tests.clock import Clock

PAD, EOS, START, MAX_TARGET, VOCAB = 0, 1, 2, 40, 80
POISON = -1
LONG = 25
LENGTH_AFTER_NOTHING = 6
# Steps of 1/4 make ties, which the lower id wins.
LOGITS = np.round(np.random.default_rng(0).normal(0, 2, (509, VOCAB)) * 4) / 4

Ids = tuple[int, ...]
Predict = Callable[[Ids, Ids], NDArray[np.float32]]
"""A model: from a source and all tokens fed, the start token included, to log-probabilities `[V]` of the next token."""


@lru_cache(maxsize=20_000)
def predict(source: Ids, history: Ids) -> NDArray[np.float32]:
    """The fake model.

    The source's first id is the length of the greedy answer, end-of-sequence included; before the end of a long one
    end-of-sequence is the least likely of all tokens. The padding token has no probability.
    """
    noise = hash((source, history))
    logits = np.roll(LOGITS[noise % 509], noise // 509 % VOCAB)
    logits[PAD] = -np.inf
    length = source[0] if source else LENGTH_AFTER_NOTHING
    early = -1 if length < LONG else logits[2:].min() - logits[2:].max() - 1
    logits[EOS] = logits[2:].max() + (1 if len(history) >= length else early)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


@lru_cache(maxsize=20_000)
def likeliest(source: Ids, history: Ids) -> Candidates:
    log_probs = predict(source, history)
    ids = np.argsort(-log_probs, kind="stable")
    return Candidates(ids, log_probs[ids])


class Path:
    """A way an answer may go, for the reference."""

    def __init__(self, request: Request, model: Predict, choices: NDArray[np.int64]) -> None:
        self.request, self.model, self.choices = request, model, choices
        self.start = START if request.decoder_start_id is None else request.decoder_start_id
        self.tokens = list(request.search.forced_prefix)
        self.log_probs: list[float] = []
        self.total = 0.0
        self.tops: list[tuple[list[int], list[float]]] = []
        self.is_eos = False

    @property
    def score(self) -> float:
        search = self.request.search
        length = len(self.log_probs) + search.num_forced
        return self.total / length**search.length_penalty if self.log_probs else 0.0

    @property
    def has_ended(self) -> bool:
        return self.is_eos or len(self.log_probs) == self.request.max_new_tokens

    def predicted(self) -> NDArray[np.float32]:
        return self.model(tuple(self.request.source_ids), (self.start, *self.tokens))

    def options(self) -> list[tuple[float, int, float]]:
        search, tokens = self.request.search, self.tokens
        size = search.no_repeat_ngram_size
        banned = set(search.suppressed_tokens)
        if len(self.log_probs) < search.min_new_tokens:
            banned.add(EOS)
        if size and len(tokens) >= size:
            here = tokens[len(tokens) - size + 1 :]
            banned |= {tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tokens[i : i + size - 1] == here}
        log_probs = self.predicted().tolist()
        if search.is_end_forced and len(self.log_probs) == self.request.max_new_tokens - 1:
            return [(0.0, EOS, log_probs[EOS])]
        values = [log_prob * search.repetition_penalty if i in tokens else log_prob for i, log_prob in enumerate(log_probs)]
        allowed = [i for i, log_prob in enumerate(log_probs) if i not in banned and log_prob > -np.inf]
        return [(values[i], i, log_probs[i]) for i in sorted(allowed, key=lambda i: (-values[i], i))]

    def extended(self, option: tuple[float, int, float]) -> "Path":
        value, token, log_prob = option
        longer = Path(self.request, self.model, self.choices)
        log_probs = self.predicted()[self.choices]
        top = np.argsort(-log_probs, kind="stable")[: self.request.search.num_top_log_probs]
        longer.tokens = self.tokens + [token] * (token != EOS)
        longer.log_probs = [*self.log_probs, log_prob]
        longer.total = self.total + value
        longer.tops = [*self.tops, (self.choices[top].tolist(), log_probs[top].tolist())]
        longer.is_eos = token == EOS
        return longer

    def answer(self) -> Answer:
        tops = self.tops if self.request.search.num_top_log_probs else []
        reason = "eos" if self.is_eos else "length"
        return Answer(self.tokens, self.log_probs, self.score, reason, [ids for ids, _ in tops], [values for _, values in tops])


def beam_reference(first: Path) -> list[Path]:
    search = first.request.search
    width, live, finished = search.num_beams, [first], list[Path]()
    while True:
        ways = [(path.total + way[0], i, path, way) for i, path in enumerate(live) for way in path.options()]
        best = sorted(ways, key=lambda way: (-way[0], way[1]))[: 2 * width]
        longer = [path.extended(way) for _, _, path, way in best]
        finished += [path for path in longer[:width] if path.is_eos]
        finished = sorted(finished, key=lambda path: -path.score)[:width]
        before, live = live, [path for path in longer if not path.is_eos][:width]
        if not live:
            return finished or sorted(before, key=lambda path: -path.score)
        if live[0].has_ended:
            return sorted(finished + live, key=lambda path: -path.score)
        if len(finished) == width and (search.is_stopped_early or live[0].score <= finished[-1].score):
            return finished


def drawn(options: list[tuple[float, int, float]], request: Request, number: float) -> tuple[float, int, float]:
    """Return the option that a random number falls on."""
    sampling = request.search.sampling
    assert sampling is not None
    options = options[: sampling.top_k or None]
    weights = np.exp((np.array([value for value, _, _ in options]) - options[0][0]) / sampling.temperature)
    if sampling.top_p < 1:
        weights = weights[: 1 + int(np.sum(np.cumsum(weights) < sampling.top_p * weights.cumsum()[-1]))]
    return options[min(int(np.sum(np.cumsum(weights) <= number * weights.cumsum()[-1])), len(weights) - 1)]


def separate_reference(first: Path) -> list[Path]:
    search, answers = first.request.search, list[Path]()
    for index in range(search.num_answers):
        path = first
        random = np.random.Generator(np.random.Philox(key=np.array([search.sampling.seed if search.sampling else 0, index], "u8")))
        while not path.has_ended and (options := path.options()):
            if search.sampling:
                option = drawn(options, first.request, random.random())
            elif search.has_alternatives and not path.log_probs:
                if index >= len(options):
                    return answers
                option = options[index]
            else:
                option = options[0]
            path = path.extended(option)
        answers.append(path)
        if not path.log_probs:  # nothing may come at all
            break
    return answers


ALL_TOKENS = np.arange(VOCAB)


def reference_answers(request: Request, model: Predict = predict, choices: NDArray[np.int64] = ALL_TOKENS) -> list[Answer]:
    """Return what a request must be answered with, whatever else happens.

    Args:
        request: What is asked.
        model: Which answers.
        choices: Tokens that its steps choose from, rising.
    """
    first = Path(request, model, choices)
    paths = beam_reference(first) if request.search.num_beams > 1 else separate_reference(first)
    return [path.answer() for path in paths[: request.search.num_answers]]


class FakeRunner:
    """See the module's docstring.

    `fail_next` makes the next call of that name raise `error`. `complaints` keeps what was asked against the contract, for the
    engine takes what is raised for a failed step. One that has prompts knows of a source what has been read into its caches, and
    nothing else.
    """

    device = "fake"
    graphs = None
    can_skip_log_probs = True
    memory: Mapping[str, int] = {"caches": 5}

    def __init__(self, max_rows: int, has_prompts: bool = False) -> None:
        self.max_rows, self.has_prompts, self.can_hold = max_rows, has_prompts, not has_prompts
        self.sources: list[Ids] = [()] * max_rows
        self.owners = [0] * max_rows
        self.capacity = 3 * MAX_TARGET if has_prompts else MAX_TARGET
        self.caches = [[POISON] * self.capacity for _ in range(max_rows)]
        self.pieces: list[tuple[int, int, int]] = []
        self.log_probs = np.full((max_rows, VOCAB), np.nan, np.float32)
        self.has_log_probs = False
        self.fail_next: str | None = None
        self.error: Exception = RuntimeError("made to fail")
        self.memory_tokens: int | None = None
        self.complaints: list[str] = []
        self.step_rows: list[int] = []
        self.step_candidates: list[int] = []
        self.prefill_batches: list[int] = []
        self.encode_batches: list[int] = []
        self.copies: list[tuple[str, int, int]] = []
        self.looks: list[tuple[int, int, int]] = []
        self.last_step: dict[int, tuple[int, int]] = {}
        self.on_step: Callable[[], None] = lambda: None
        self.on_refetch: Callable[[], None] = lambda: None
        self.on_read: Callable[[int], None] = lambda _: None
        self._num_prefilled = 0
        self._buffers: dict[tuple[int, int], Candidates] = {}

    def _maybe_fail(self, name: str) -> None:
        if self.fail_next == name:
            self.fail_next = None
            raise self.error

    def _demand(self, condition: bool, complaint: str) -> None:
        if not condition:
            self.complaints.append(complaint)
            raise AssertionError(complaint)

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        self._maybe_fail("prefill")
        self._demand(len(set(rows)) == len(rows) == len(sources), "a row for each source")
        if self.memory_tokens is not None and sum(map(len, sources)) > self.memory_tokens:
            raise MemoryError
        self.prefill_batches.append(len(rows))
        self._fill(sources, rows)

    @property
    def holder(self) -> "FakeRunner | None":
        return self if self.can_hold else None

    @property
    def reader(self) -> "FakeRunner | None":
        return self if self.has_prompts else None

    def encode(self, sources: Sequence[Sequence[int]]) -> list[Held]:
        """Keep the ids in place of what is made of them: of tokens, and of the source."""
        self._maybe_fail("encode")
        self.encode_batches.append(len(sources))
        return [Held(np.array(source, np.float32)[:, None], np.array(source, np.float32)) for source in sources]

    def place(self, held: Sequence[Held], rows: Sequence[int]) -> None:
        self._maybe_fail("place")
        self._demand(len(set(rows)) == len(rows) == len(held) > 0, "a row for each source")
        self._demand(all((one.tokens[:, 0] == one.states).all() for one in held), "what was held together")
        self._fill([one.tokens[:, 0].astype(int).tolist() for one in held], rows)

    def read(self, row: int, source_ids: Sequence[int], first: int, stop: int) -> None:
        """Write the prompt where the answer follows it, over whatever a step has written there."""
        self._maybe_fail("prefill")
        self.on_read(stop - first)
        if first == 0:
            self._fill([()], [row])
        self._demand(first == len(self.sources[row]) <= stop <= len(source_ids), "a piece that follows the last")
        self._demand(self.sources[row] == tuple(source_ids[:first]), "a piece of the same prompt")
        if first == stop:
            self._demand(first == 0, "a piece of something")
            return
        self.pieces.append((row, first, stop))
        self.caches[row][first:] = [*source_ids[first:stop], *[POISON] * (self.capacity - stop)]
        self.sources[row] = tuple(self.caches[row][:stop])

    def _fill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        for source, row in zip(sources, rows, strict=True):
            self._num_prefilled += 1
            self.sources[row], self.owners[row] = tuple(source), self._num_prefilled
            self.caches[row][:] = [POISON] * self.capacity

    def _candidates_of(self, row: int, length: int) -> Candidates:
        """Return the model's candidates after what a row's caches have: its source, and so many tokens after it."""
        first = self._first(row)
        source = tuple(self.caches[row][:first]) if self.has_prompts else self.sources[row]
        history = tuple(self.caches[row][first : first + length])
        self._demand(POISON not in (*source, *history), "a row reads what was never written")
        return likeliest(source, history)

    def _first(self, row: int) -> int:
        """Return where in a row's caches its first token after the source is."""
        return len(self.sources[row]) if self.has_prompts else 0

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        self._maybe_fail("step")
        self._demand(0 < len(tokens) == len(positions) <= self.max_rows, "rows")
        self._demand(0 <= num_candidates <= VOCAB, "candidates")
        self.on_step()
        self.step_rows.append(len(tokens))
        self.step_candidates.append(num_candidates)
        shape = len(tokens), max(1, num_candidates)
        buffer = self._buffers.setdefault(shape, Candidates(np.empty(shape, np.int64), np.empty(shape, np.float32)))
        self.last_step = dict(enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)))
        for row, (token, position) in self.last_step.items():
            self.caches[row][self._first(row) + position] = token
            everything = self._candidates_of(row, position + 1)
            buffer.ids[row] = everything.ids[: shape[1]]
            buffer.log_probs[row] = everything.log_probs[: shape[1]] if num_candidates else 0
            self.log_probs[row, everything.ids] = everything.log_probs
        return replace(buffer, all_log_probs=list(self.log_probs[: len(tokens)])) if self.has_log_probs else buffer

    def refetch(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        self._maybe_fail("look")
        self.looks.append((first_row, len(tokens), num_candidates))
        self.on_refetch()
        ids: list[NDArray[np.int64]] = []
        log_probs: list[NDArray[np.float32]] = []
        for row, fed in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True), first_row):
            self._demand(self.last_step.get(row) == fed, "a look at what was not in the last step")
            everything = self._candidates_of(row, fed[1] + 1)
            ids.append(everything.ids[:num_candidates])
            log_probs.append(everything.log_probs[:num_candidates])
        return Candidates(np.stack(ids), np.stack(log_probs))

    def copy_row(self, source: int, target: int, length: int) -> None:
        stop = self._first(source) + length
        self._demand(source != target and POISON not in self.caches[source][:stop], "a row to copy")
        self.copies.append(("row", 0, length))
        self.sources[target], self.owners[target] = self.sources[source], self.owners[source]
        self.caches[target][:] = self.caches[source][:stop] + [POISON] * (self.capacity - stop)

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        self.copies.append(("positions", start, stop))
        start, stop = self._first(source) + start, self._first(source) + stop
        self._demand(source != target and POISON not in self.caches[source][start:stop], "positions to copy")
        self._demand(self.owners[source] == self.owners[target], "another source")
        self._demand(self.caches[target][start] != self.caches[source][start], "what is copied differs")
        self.caches[target][start:] = self.caches[source][start:stop] + [POISON] * (self.capacity - stop)

    def rest(self) -> None: ...

    def cache_bytes(self) -> tuple[int, int]:
        used = sum(token != POISON for row in self.caches for token in row)
        return self.max_rows * self.capacity, used


class FakeGraphs:
    """Steps that are still to be captured; `error` is raised for each, or where so many are left."""

    def __init__(self, num_pending: int, error: Exception | None = None, fails_at: int | None = None) -> None:
        self.num_pending, self.num_captured, self.error, self.fails_at = num_pending, 0, error, fails_at
        self.is_disabled, self.all_done = False, threading.Event()

    @property
    def has_pending(self) -> bool:
        return self.num_pending > 0

    def capture_next(self) -> None:
        self.num_pending -= 1
        if not self.num_pending:
            self.all_done.set()
        if self.error is not None and self.fails_at in (None, self.num_pending):
            raise self.error
        self.num_captured += 1


class Bench:
    """An engine with a fake runner and a fake clock, and the ends of its requests."""

    def __init__(
        self,
        max_slots: int = 4,
        budget: int = 1000,
        max_prefetch: int = 0,
        has_prompts: bool = False,
        step_seconds: float = 0.0,
        look_seconds: float = 0.0,
    ) -> None:
        self.clock = Clock(100.0)
        self.runner = FakeRunner(max_slots, has_prompts)
        self.runner.on_step = lambda: self.wait(step_seconds)
        self.runner.on_refetch = lambda: self.wait(look_seconds)
        self.engine = Engine(
            self.runner,
            Limits(max_slots, budget, max_prefetch),
            TargetSide(VOCAB, EOS, START, MAX_TARGET),
            clock=self.clock,
        )
        self.finished: dict[int, Finished] = {}
        self.streamed: dict[int, list[int]] = {}
        self.shrunk: dict[int, list[int]] = {}
        self.order: list[int] = []

    @property
    def reasons(self) -> dict[int, str]:
        return {number: end.reason for number, end in self.finished.items()}

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def submit(self, request_id: int, source: list[int], limit: int = MAX_TARGET, **fields: Any) -> Request:
        request = Request(request_id, source, limit, self.clock.now, **fields)
        self.engine.submit(request)
        if self.engine.has_news:
            self.collect()
        return request

    def cancel(self, request_id: int) -> None:
        self.engine.cancel(request_id)
        self.collect()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.collect()

    def collect(self) -> None:
        assert self.runner.complaints == []
        report = self.engine.take_report()
        for tokens in report.tokens:
            assert tokens.id not in self.finished, "a token after the end"
            self.streamed.setdefault(tokens.id, []).extend(tokens.token_ids)
        for shrunk in report.shrunk:
            self.shrunk.setdefault(shrunk.id, []).append(shrunk.num_slots)
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
        assert self.engine.num_used_slots == 0

    def check(self, *requests: Request) -> None:
        for request in requests:
            assert self.finished[request.id].answers == reference_answers(request)
