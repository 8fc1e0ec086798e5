"""Messages between frontend processes, dispatcher and engines: msgspec structs, MessagePack on the wire.

Times are `time.monotonic()` seconds, a clock shared by all processes of a machine.
"""

from typing import Literal

from msgspec import Struct

from dragoman.export.processor import Platform
from dragoman.server.engine.snapshot import Snapshot, Watch

FinishReason = Literal[
    "eos", "length", "cancelled", "deadline", "deadline_unmet", "queue_full", "step_failed", "draining", "not_loaded", "lost"
]


class Sampling(Struct, frozen=True, array_like=True):
    """Sampling of tokens.

    Attributes:
        seed: 0 to 2^64 - 1; every draw depends only on it and the answer's index.
        temperature: Divisor of log-probabilities; above 0.
        top_k: Likeliest tokens drawn from; 0 for all.
        top_p: Probability of the likeliest tokens drawn from, in (0, 1].
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class SearchOptions(Struct, frozen=True, array_like=True):
    """Options of a search, by default greedy; docs/api.md has the formulas.

    Attributes:
        num_beams: 1 for no beam search.
        num_answers: Answers wanted: of the beams, sampled, or alternatives.
        length_penalty: Exponent of the length in a score.
        is_stopped_early: Whether beam search ends as soon as `num_beams` hypotheses are finished.
        sampling: None to take the likeliest tokens.
        has_alternatives: Whether answers begin, after the forced prefix, with the `num_answers` likeliest tokens.
        min_new_tokens: Tokens generated before end-of-sequence is allowed.
        repetition_penalty: Factor of the log-probabilities of tokens already in the answer.
        no_repeat_ngram_size: Length of n-grams that may not repeat; 0 for no limit.
        suppressed_tokens: Never generated.
        forced_prefix: First tokens of the answer; not counted in `max_new_tokens`.
        num_top_log_probs: Likeliest tokens reported for each position.
        num_forced: Tokens of the forced prefix that count in a score's length.
        is_end_forced: Whether the last token that `max_new_tokens` allows is end-of-sequence, at no cost in the score.
    """

    num_beams: int = 1
    num_answers: int = 1
    length_penalty: float = 1.0
    is_stopped_early: bool = False
    sampling: Sampling | None = None
    has_alternatives: bool = False
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppressed_tokens: list[int] = []
    forced_prefix: list[int] = []
    num_top_log_probs: int = 0
    num_forced: int = 0
    is_end_forced: bool = False

    @property
    def num_slots(self) -> int:
        """Most rows of the decode batch held at once."""
        return max(self.num_beams, self.num_answers)


GREEDY = SearchOptions()


class Share(Struct, frozen=True, array_like=True):
    """The caller of a request, and its share of the engines.

    Attributes:
        caller: Name; empty for all unknown callers together.
        weight: Proportion of the engines' work among waiting callers; 10^-9 to 10^9.
        max_slots: Slots that the caller may hold at once; 0 for no limit.
        max_waiting: Requests of the caller that may wait; 0 for no limit of its own.
    """

    caller: str = ""
    weight: float = 1.0
    max_slots: int = 0
    max_waiting: int = 0


ANYBODY = Share()


class Request(Struct, frozen=True, array_like=True):
    """Validated client input.

    Attributes:
        id: Unique within the frontend.
        source_ids: Source tokens, end-of-sequence included.
        max_new_tokens: Limit of generated tokens, with end-of-sequence, without the forced prefix.
        arrival: Time of receipt by the frontend.
        deadline: None for never.
        is_streamed: Whether tokens are reported as they are generated.
        priority: Higher is served first.
        decoder_start_id: First token fed to the decoder; None for the model's.
    """

    id: int
    source_ids: list[int]
    max_new_tokens: int
    arrival: float
    deadline: float | None = None
    is_streamed: bool = False
    priority: int = 0
    search: SearchOptions = GREEDY
    share: Share = ANYBODY
    decoder_start_id: int | None = None


class ScoreRequest(Struct, frozen=True, array_like=True):
    """Validated request for the scores of a target; fields not listed are those of `Request`.

    Attributes:
        id: Unique within the frontend, among `Request`s too.
        target_ids: Target tokens, end-of-sequence included.
        is_aligned: Whether the alignment matrix is wanted.
        alignment_layer: Decoder layer it is taken from; None for the mean of all.
    """

    id: int
    source_ids: list[int]
    target_ids: list[int]
    arrival: float
    deadline: float | None = None
    priority: int = 0
    is_aligned: bool = False
    alignment_layer: int | None = None
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


Command = Hello | Submit | Score | Cancel | Watch | Stop


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine has been loaded and warmed up.

    Attributes:
        device: For example `cpu`.
        max_slots: Rows of the decode batch.
        load_seconds: Time to load the bundle and to warm up.
        platform: Determines the bits of answers if `device` is the CPU.
    """

    device: str
    max_slots: int
    load_seconds: float
    platform: Platform = Platform()


class Answer(Struct, frozen=True, array_like=True):
    """One generated sequence.

    Attributes:
        token_ids: With the forced prefix, without end-of-sequence.
        log_probs: The model's log-probability of each generated token: without the prefix, with end-of-sequence.
        score: Sum of the log-probabilities as the search saw them, over length^length_penalty;
            `SearchOptions.num_forced` tokens of the prefix count in that length.
        top_ids: For each generated token the likeliest ones at its position, as many as requested.
        top_log_probs: Their log-probabilities.
    """

    token_ids: list[int]
    log_probs: list[float]
    score: float
    reason: Literal["eos", "length"]
    top_ids: list[list[int]] = []
    top_log_probs: list[list[float]] = []


class Finished(Struct, frozen=True, array_like=True):
    """The end of a request; each accepted request gets exactly one.

    Attributes:
        reason: The first answer's `eos` or `length`; anything else is an error.
        answers: In the order of the response, in full even if streamed; none for an error.
        num_generated: Tokens generated, for an error until then; with end-of-sequence, without the forced prefix.
        admitted: Time at which it got its slots; None if it never did.
        prefill_seconds: Encoder time of its prefill batch.
        first_token: Time of its first token; None if there was none.
        incident: Id in the log for `step_failed`; empty otherwise.
        retry_after_seconds: For `queue_full`: until a place is likely; for `lost`: until a retry makes sense.
        needed_seconds: For `deadline_unmet`: the time it would have taken.
        limit: For `queue_full`: name of the caller's own limit; empty for the queue's.
    """

    id: int
    reason: FinishReason
    answers: list[Answer]
    num_generated: int
    admitted: float | None
    prefill_seconds: float
    first_token: float | None
    ended: float
    incident: str = ""
    retry_after_seconds: float = 0.0
    needed_seconds: float = 0.0
    limit: str = ""


class Scored(Struct, frozen=True, array_like=True):
    """The end of a `ScoreRequest`; each gets exactly one. Fields not listed are those of `Finished`.

    Attributes:
        reason: `eos` for an answer; anything else is an error.
        log_probs: Of the target's tokens, end-of-sequence included.
        alignment: `[T, S]` float32 in row-major order, if requested.
        retry_after_seconds: Also for `not_loaded`: until the next attempt to load the scorer.
    """

    id: int
    reason: FinishReason
    log_probs: list[float]
    alignment: bytes
    ended: float
    incident: str = ""
    retry_after_seconds: float = 0.0
    limit: str = ""


class Tokens(Struct, frozen=True, array_like=True):
    """New tokens of a streamed request's first answer that no later step can change."""

    id: int
    token_ids: list[int]


class Step(Struct, frozen=True, array_like=True):
    """One decode step; the duration includes the search."""

    num_rows: int
    seconds: float


class Prefill(Struct, frozen=True, array_like=True):
    """Prefill work between two decode steps.

    Attributes:
        num_rows: Sources encoded, those of waiting requests included, or prompts read from.
        num_tokens: Tokens encoded or read.
        num_admitted: Requests that got their slots.
    """

    num_rows: int
    num_tokens: int
    seconds: float
    num_admitted: int


class Statistics(Struct, frozen=True, array_like=True):
    """State of an engine and its work since the last report, or state of a model with its queue.

    Attributes:
        num_waiting: Requests without slots.
        num_waiting_tokens: Source tokens of the waiting requests.
        num_slots: Slots in use.
        num_places: Requests accepted before the queue is full; None for an engine.
        retry_after_seconds: Time until a full queue is likely to have a place, for a caller alone in it.
        queue_seconds: Likely wait of a new request that needs one slot.
        cache_bytes_reserved: Memory of the caches.
        cache_bytes_used: Part of that used by rows a few steps ago.
        without_claim: Waiting callers that could evict nothing from a full queue, and the time until each is likely to have a
            place; None if too many wait or there are plenty of places.
        at_their_limit: Callers known to have reached their `max_waiting`, with the same times.
    """

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_running: int = 0
    num_slots: int = 0
    num_places: int | None = None
    retry_after_seconds: float = 0.0
    queue_seconds: float = 0.0
    cache_bytes_reserved: int = 0
    cache_bytes_used: int = 0
    steps: list[Step] = []
    prefills: list[Prefill] = []
    without_claim: dict[str, float] | None = {}
    at_their_limit: dict[str, float] = {}


class Shrunk(Struct, frozen=True, array_like=True):
    """A running request that holds fewer slots from now on."""

    id: int
    num_slots: int


class Report(Struct, frozen=True, array_like=True, tag="report"):
    """Events since the last report, of an engine or of a dispatcher to a frontend; a heartbeat if empty.

    Attributes:
        num_received: Requests, without score requests, that the frontend had sent before a dispatcher made `statistics`.
    """

    tokens: list[Tokens]
    finished: list[Finished]
    statistics: Statistics
    scored: list[Scored] = []
    num_received: int = 0
    shrunk: list[Shrunk] = []


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start and exits; `reason` is one line for the operator."""

    reason: str


class Down(Struct, frozen=True, array_like=True, tag="down"):
    """The last engine of a model is gone, with all its requests; `Ready` follows once there is one again."""

    retry_after_seconds: float


Event = Ready | Report | Snapshot | Fatal | Down
