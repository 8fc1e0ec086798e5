"""Messages between frontend processes, dispatcher and engines: msgspec structs, MessagePack on the wire.

Times are `time.monotonic()` seconds, a clock shared by all processes of a machine.
"""

import heapq
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from dragoman.export.processor import Platform

FinishReason = Literal[
    "eos", "length", "cancelled", "deadline", "deadline_unmet", "queue_full", "step_failed", "draining", "not_loaded", "lost"
]


class Sampling(Struct, frozen=True, array_like=True):
    """Sampling of tokens."""

    seed: int  # 0 to 2^64 - 1; every draw depends only on it and the answer's index
    temperature: float = 1.0  # divisor of log-probabilities; above 0
    top_k: int = 0  # likeliest tokens drawn from; 0 for all
    top_p: float = 1.0  # probability of the likeliest tokens drawn from, in (0, 1]


class SearchOptions(Struct, frozen=True, array_like=True):
    """Options of a search, by default greedy; docs/api.md has the formulas."""

    num_beams: int = 1  # 1 for no beam search
    num_answers: int = 1  # answers wanted: of the beams, sampled, or alternatives
    length_penalty: float = 1.0  # exponent of the length in a score
    is_stopped_early: bool = False  # whether beam search ends as soon as `num_beams` hypotheses are finished
    sampling: Sampling | None = None  # None to take the likeliest tokens
    has_alternatives: bool = False  # whether answers begin, after the forced prefix, with the `num_answers` likeliest tokens
    min_new_tokens: int = 0  # tokens generated before end-of-sequence is allowed
    repetition_penalty: float = 1.0  # factor of the log-probabilities of tokens already in the answer
    no_repeat_ngram_size: int = 0  # length of n-grams that may not repeat; 0 for no limit
    suppressed_tokens: list[int] = []  # never generated
    forced_prefix: list[int] = []  # first tokens of the answer; not counted in `max_new_tokens`
    num_top_log_probs: int = 0  # likeliest tokens reported for each position
    num_forced: int = 0  # tokens of the forced prefix that count in a score's length
    is_end_forced: bool = False  # whether the last token that `max_new_tokens` allows is end-of-sequence, at no cost in the score
    has_log_probs: bool = True  # whether the answer's log-probabilities and score are wanted; without, greedy search has zeros
    terms: list[list[list[int]]] = []  # alternatives of each term that the answer should have, as token ids; for beam search

    @property
    def num_slots(self) -> int:
        """Most rows of the decode batch held at once."""
        return max(self.num_beams, self.num_answers)


GREEDY = SearchOptions()


class Share(Struct, frozen=True, array_like=True):
    """The caller of a request, and its share of the engines."""

    caller: str = ""  # name; empty for all unknown callers together
    weight: float = 1.0  # proportion of the engines' work among waiting callers; 10^-9 to 10^9
    max_slots: int = 0  # slots that the caller may hold at once; 0 for no limit
    max_waiting: int = 0  # requests of the caller that may wait; 0 for no limit of its own


ANYBODY = Share()
# Of requests that run only where others leave room.
LOWEST_PRIORITY = -10


class Request(Struct, frozen=True, array_like=True):
    """Validated client input."""

    id: int  # unique within the frontend
    source_ids: list[int]  # source tokens, end-of-sequence included
    max_new_tokens: int  # limit of generated tokens, with end-of-sequence, without the forced prefix
    arrival: float  # time of receipt by the frontend
    deadline: float | None = None  # None for never
    is_streamed: bool = False  # whether tokens are reported as they are generated
    priority: int = 0  # higher is served first
    search: SearchOptions = GREEDY
    share: Share = ANYBODY
    decoder_start_id: int | None = None  # first token fed to the decoder; None for the model's
    # Range of the source tokens that an answer's tokens are aligned to, counted from its start; None for no alignment.
    text_range: tuple[int, int] | None = None


class ScoreRequest(Struct, frozen=True, array_like=True):
    """Validated request for the scores of a target; fields not listed are those of `Request`."""

    id: int  # unique within the frontend, among `Request`s too
    source_ids: list[int]
    target_ids: list[int]  # target tokens, end-of-sequence included
    arrival: float
    deadline: float | None = None
    priority: int = 0
    is_aligned: bool = False  # whether the alignment matrix is wanted
    alignment_layer: int | None = None  # decoder layer it is taken from; None for the mean of all
    share: Share = ANYBODY
    decoder_start_id: int | None = None


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """Attach to an engine or a dispatcher; answered by `Ready` once it is ready, or by an engine's `Fatal`."""


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """New requests, in order of arrival."""

    requests: list[Request]


class Score(Struct, frozen=True, array_like=True, tag="score"):
    """New score requests, in order of arrival."""

    requests: list[ScoreRequest]


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Requests to cancel; unknown ids are ignored, since they may have just finished."""

    ids: list[int]


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """End the process; running requests end as `draining`."""


# Snapshots of engines, slot by slot, for live statistics: made on demand only, without text or tokens of requests.
# Callers reported by name; the others are summed under the empty name.
MAX_CALLERS = 64


class SlotUse(Struct, frozen=True, array_like=True):
    """A slot held by a request."""

    slot: int  # row of the decode batch
    request: int  # number of the request, the same for all its slots and unique in the engine
    is_prefill: bool  # whether its source is still being read
    num_source_tokens: int
    num_tokens: int  # tokens generated so far, without the forced prefix
    max_new_tokens: int


class CallerUse(Struct, frozen=True, array_like=True):
    """Requests of a caller; the empty name is for unknown ones."""

    name: str
    num_waiting: int = 0
    num_running: int = 0


class StepTotals(Struct, frozen=True, array_like=True):
    """Decode steps, counted only while snapshots are taken: only differences between snapshots are meaningful."""

    num_steps: int = 0
    num_rows: int = 0  # rows decoded in all steps, a token each
    seconds: float = 0.0  # total duration


class EngineSnapshot(Struct, frozen=True, array_like=True):
    """State of one engine at `time.monotonic()` `at`; slots are in order of row, `replica` is the engine number."""

    at: float
    slots: list[SlotUse] = []
    totals: StepTotals = StepTotals()
    replica: int = 0


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot"):
    """State of a model, the answer to one `Watch`."""

    engines: list[EngineSnapshot]  # ready engines, by number
    callers: list[CallerUse]  # at most `MAX_CALLERS` callers with requests, most first, and one entry for the rest


class Watch(Struct, frozen=True, array_like=True, tag="watch"):
    """Request one `Snapshot`, taken before the next step."""


Command = Hello | Submit | Score | Cancel | Watch | Stop


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine has been loaded and warmed up."""

    device: str  # for example `cpu`
    max_slots: int  # rows of the decode batch
    load_seconds: float  # time to load the bundle and to warm up
    platform: Platform = Platform()  # determines the bits of answers if `device` is the CPU


class Answer(Struct, frozen=True, array_like=True):
    """One generated sequence."""

    token_ids: list[int]  # with the forced prefix, without end-of-sequence
    log_probs: list[float]  # the model's log-probability of each generated token: without the prefix, with end-of-sequence
    # Sum of the log-probabilities as the search saw them, over length^length_penalty; `SearchOptions.num_forced` tokens of the
    # prefix count in that length.
    score: float
    reason: Literal["eos", "length"]
    top_ids: list[list[int]] = []  # for each generated token the likeliest ones at its position, as many as requested
    top_log_probs: list[list[float]] = []  # their log-probabilities
    alignment: list[int] = []  # source token of each of `token_ids`, see `Request.text_range`


class Finished(Struct, frozen=True, array_like=True):
    """The end of a request; each accepted request gets exactly one."""

    id: int
    reason: FinishReason  # the first answer's `eos` or `length`; anything else is an error
    answers: list[Answer]  # in the order of the response, in full even if streamed; none for an error
    num_generated: int  # tokens generated, for an error until then; with end-of-sequence, without the forced prefix
    admitted: float | None  # time at which it got its slots; None if it never did
    prefill_seconds: float  # encoder time of its prefill batch
    first_token: float | None  # time of its first token; None if there was none
    ended: float
    incident: str = ""  # id in the log for `step_failed`; empty otherwise
    retry_after_seconds: float = 0.0  # for `queue_full`: until a place is likely; for `lost`: until a retry makes sense
    needed_seconds: float = 0.0  # for `deadline_unmet`: the time it would have taken
    limit: str = ""  # for `queue_full`: name of the caller's own limit; empty for the queue's


class Scored(Struct, frozen=True, array_like=True):
    """The end of a `ScoreRequest`; each gets exactly one. Fields not listed are those of `Finished`."""

    id: int
    reason: FinishReason  # `eos` for an answer; anything else is an error
    log_probs: list[float]  # of the target's tokens, end-of-sequence included
    alignment: bytes  # `[T, S]` float32 in row-major order, if requested
    ended: float
    incident: str = ""
    retry_after_seconds: float = 0.0  # also for `not_loaded`: until the next attempt to load the scorer
    limit: str = ""


class Tokens(Struct, frozen=True, array_like=True):
    """New tokens of a streamed request's first answer that no later step can change."""

    id: int
    token_ids: list[int]


class Step(Struct, frozen=True, array_like=True):
    """One decode step; the duration includes the search."""

    num_rows: int
    seconds: float
    cpu_seconds: float = 0.0  # that the engine's own thread had a core meanwhile


class Prefill(Struct, frozen=True, array_like=True):
    """Prefill work between two decode steps."""

    num_rows: int  # sources encoded, those of waiting requests included, or prompts read from
    num_tokens: int  # tokens encoded or read
    seconds: float
    num_admitted: int  # requests that got their slots


class Statistics(Struct, frozen=True, array_like=True):
    """State of an engine and its work since the last report, or state of a model with its queue."""

    num_waiting: int = 0  # requests without slots
    num_waiting_tokens: int = 0  # source tokens of the waiting requests
    num_running: int = 0
    num_slots: int = 0  # slots in use
    num_places: int | None = None  # requests accepted before the queue is full; None for an engine
    retry_after_seconds: float = 0.0  # time until a full queue is likely to have a place, for a caller alone in it
    queue_seconds: float = 0.0  # likely wait of a new request that needs one slot
    cache_bytes_reserved: int = 0  # memory of the caches
    cache_bytes_used: int = 0  # part of that used by rows a few steps ago
    steps: list[Step] = []
    prefills: list[Prefill] = []
    # Waiting callers that could evict nothing from a full queue, and the time until each is likely to have a place; None if too
    # many wait or there are plenty of places.
    without_claim: dict[str, float] | None = {}
    at_their_limit: dict[str, float] = {}  # callers known to have reached their `max_waiting`, with the same times
    num_urgent: int = 0  # requests in flight above the lowest priority; 0 for an engine


class Shrunk(Struct, frozen=True, array_like=True):
    """A running request that holds fewer slots from now on."""

    id: int
    num_slots: int


class Report(Struct, frozen=True, array_like=True, tag="report"):
    """Events since the last report, of an engine or of a dispatcher to a frontend; a heartbeat if empty."""

    tokens: list[Tokens]
    finished: list[Finished]
    statistics: Statistics
    scored: list[Scored] = []
    num_received: int = 0  # requests, without score requests, that the frontend had sent before a dispatcher made `statistics`
    shrunk: list[Shrunk] = []


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start and exits; `reason` is one line for the operator."""

    reason: str


class Down(Struct, frozen=True, array_like=True, tag="down"):
    """The last engine of a model is gone, with all its requests; `Ready` follows once there is one again."""

    retry_after_seconds: float


Event = Ready | Report | Snapshot | Fatal | Down


def summed_up(uses: Iterable[CallerUse]) -> list[CallerUse]:
    """Return one entry for each caller, by name only for those with most; see `Snapshot.callers`."""
    by_name: dict[str, CallerUse] = {}
    for use in uses:
        by_name[use.name] = _sum(use.name, [by_name.get(use.name, CallerUse(use.name)), use])
    if len(by_name) > MAX_CALLERS:
        most = heapq.nlargest(MAX_CALLERS, (use for use in by_name.values() if use.name), key=_order)
        others = by_name.keys() - {use.name for use in most}
        by_name = {use.name: use for use in (*most, _sum("", [by_name[name] for name in others]))}
    return sorted(by_name.values(), key=_order, reverse=True)


def of_replica(snapshot: EngineSnapshot, replica: int) -> EngineSnapshot:
    """Return an engine's snapshot with its engine number."""
    return replace(snapshot, replica=replica)


def _sum(name: str, uses: Iterable[CallerUse]) -> CallerUse:
    uses = list(uses)
    return CallerUse(name, sum(use.num_waiting for use in uses), sum(use.num_running for use in uses))


def _order(use: CallerUse) -> tuple[int, str]:
    return use.num_waiting + use.num_running, use.name
