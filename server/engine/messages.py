"""What crosses the border between a front end and an engine process: msgspec structs, MessagePack on the wire.

Times are `time.monotonic()` seconds: both processes are on one machine and share that clock.
"""

from typing import Literal

from msgspec import Struct

from dragoman.export.processor import Platform
from dragoman.server.engine.snapshot import Snapshot, Watch

FinishReason = Literal[
    "eos", "length", "cancelled", "deadline", "deadline_unmet", "queue_full", "step_failed", "draining", "not_loaded", "lost"
]


class Sampling(Struct, frozen=True, array_like=True):
    """How tokens are drawn.

    Attributes:
        seed: 0 to 2^64 - 1; with the answer's index it decides every draw.
        temperature: Log-probabilities are divided by it; above 0.
        top_k: Likeliest tokens that are drawn from; 0 for all.
        top_p: Probability of the likeliest tokens that are drawn from, in (0, 1].
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class SearchOptions(Struct, frozen=True, array_like=True):
    """How tokens are chosen; the defaults are greedy search. Formulas are in docs/api.md.

    Attributes:
        num_beams: Hypotheses of beam search; 1 for none.
        num_answers: Answers wanted: of the beams, drawn, or alternatives.
        length_penalty: Exponent of the length in a score.
        is_stopped_early: Whether beam search ends as soon as `num_beams` hypotheses are finished.
        sampling: How to draw; None to take the likeliest.
        has_alternatives: Whether answers begin, after the forced prefix, with the `num_answers` likeliest tokens.
        min_new_tokens: Tokens generated before end-of-sequence may be.
        repetition_penalty: Factor of the log-probabilities of tokens that the answer has already.
        no_repeat_ngram_size: Length of token sequences that may not occur twice; 0 for no such rule.
        suppressed_tokens: Never generated.
        forced_prefix: Tokens the answer starts with; not counted in `max_new_tokens`.
        num_top_log_probs: Likeliest tokens told for each position.
        num_forced: Tokens of the forced prefix that count in a score's length as if they had been generated.
        is_end_forced: Whether the last token that `max_new_tokens` allows is end-of-sequence, which adds nothing to a score then.
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
        """Rows of the decode batch that the search may hold at once."""
        return max(self.num_beams, self.num_answers)


GREEDY = SearchOptions()


class Share(Struct, frozen=True, array_like=True):
    """Whose a request is, and how much of the engine its caller may have.

    Attributes:
        caller: Name; requests that nobody is known for are all of one caller, the empty name.
        weight: Among callers who wait, the parts in which the engine's work is divided; 10^-9 to 10^9.
        max_slots: Slots that the caller's requests may hold at once; 0 for as many as there are.
        max_waiting: Requests of the caller that may wait; 0 for as many as the queue takes.
    """

    caller: str = ""
    weight: float = 1.0
    max_slots: int = 0
    max_waiting: int = 0


ANYBODY = Share()


class Request(Struct, frozen=True, array_like=True):
    """Validated client input.

    Attributes:
        id: Unique within the front end that sends it.
        source_ids: Source tokens, end-of-sequence included.
        max_new_tokens: Tokens to generate at the most, end-of-sequence included, the forced prefix not.
        arrival: When the front end received it.
        deadline: When the answer is no longer wanted; None for never.
        is_streamed: Whether tokens are reported as they come.
        priority: Higher is admitted first.
        search: How tokens are chosen.
        share: Whose it is.
        decoder_start_id: What the decoder is fed first; None for the model's.
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
    """A validated pair to score.

    Attributes:
        id: Unique within the front end, among `Request`s too.
        source_ids: Source tokens, end-of-sequence included.
        target_ids: Target tokens, end-of-sequence included.
        arrival: When the front end received it.
        deadline: When the answer is no longer wanted; None for never.
        priority: Higher is scored first.
        is_aligned: Whether the alignment matrix is wanted.
        alignment_layer: Decoder layer it is taken from; None for the mean of all.
        share: Whose it is.
        decoder_start_id: What the decoder is fed first; None for the model's.
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
    """A front end attaches; the engine answers `Ready` once it is, or `Fatal`."""


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """New requests, in order of arrival."""

    requests: list[Request]


class Score(Struct, frozen=True, array_like=True, tag="score"):
    """New pairs to score, in order of arrival."""

    requests: list[ScoreRequest]


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Requests nobody waits for any more; unknown ids are ignored, for they may have just finished."""

    ids: list[int]


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """End the process; whatever still runs ends as `draining`."""


Command = Hello | Submit | Score | Cancel | Watch | Stop


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine has loaded and warmed up.

    Attributes:
        device: For example `cpu`.
        max_slots: Rows of the decode batch.
        load_seconds: Time to load the bundle and to warm up.
        platform: What its process runs on, which decides the bits of answers where `device` is the CPU.
    """

    device: str
    max_slots: int
    load_seconds: float
    platform: Platform = Platform()


class Answer(Struct, frozen=True, array_like=True):
    """One generated sequence.

    Attributes:
        token_ids: Tokens, the forced prefix included, end-of-sequence not.
        log_probs: The model's log-probability of each generated token: without the prefix, with end-of-sequence.
        score: What beams are ranked by: the sum of the log-probabilities as the search saw them, over length^length_penalty;
            `SearchOptions.num_forced` tokens of the prefix count in that length.
        reason: Whether it ended by itself.
        top_ids: For each generated token the likeliest ones at its position, as many as were asked for.
        top_log_probs: Their log-probabilities.
    """

    token_ids: list[int]
    log_probs: list[float]
    score: float
    reason: Literal["eos", "length"]
    top_ids: list[list[int]] = []
    top_log_probs: list[list[float]] = []


class Finished(Struct, frozen=True, array_like=True):
    """How a request ended; each accepted request gets exactly one.

    Attributes:
        id: Of the request.
        reason: Why; `eos` and `length`, the first answer's, are answers, everything else is an error.
        answers: In the order of the answer's message (in full, also when they were streamed); none for an error.
        num_generated: Tokens generated for the answers, or until the error: end-of-sequence included, the forced prefix not.
        admitted: When it got its slots; None if it never did.
        prefill_seconds: Encoder time of the batch it was prefilled in.
        first_token: When its first token was chosen; None if there was none.
        ended: When it ended.
        incident: Id to quote for `step_failed`, as in the log; empty otherwise.
        retry_after_seconds: For `queue_full`: when a place is likely; for `lost`: when to try again.
        needed_seconds: For `deadline_unmet`: the time it would have taken from now on.
        limit: For `queue_full`: name of the limit; empty for the queue's own.
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
    """How a `ScoreRequest` ended; each gets exactly one.

    Attributes:
        id: Of the request.
        reason: `eos` for an answer, everything else is an error.
        log_probs: Of the target's tokens, end-of-sequence included.
        alignment: `[T, S]` float32 in row-major order, if asked for.
        ended: When it ended.
        incident: See `Finished`.
        retry_after_seconds: See `Finished`; for `not_loaded`: when loading is tried again.
        limit: See `Finished`.
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
    """New tokens of a streamed request's first answer, of which it is certain that they stay."""

    id: int
    token_ids: list[int]


class Step(Struct, frozen=True, array_like=True):
    """One decode step.

    Attributes:
        num_rows: Rows decoded.
        seconds: Its duration, search included.
    """

    num_rows: int
    seconds: float


class Prefill(Struct, frozen=True, array_like=True):
    """What the encoder did between two decode steps.

    Attributes:
        num_rows: Sources encoded.
        num_tokens: Their tokens.
        seconds: Its duration.
        num_admitted: Requests that got their slots; others among the sources wait for theirs, or have been encoded before.
    """

    num_rows: int
    num_tokens: int
    seconds: float
    num_admitted: int


class Statistics(Struct, frozen=True, array_like=True):
    """The engine after an iteration, and what it did since it was last asked.

    Attributes:
        num_waiting: Requests not yet admitted.
        num_waiting_tokens: Source tokens of those.
        num_running: Requests in slots.
        num_slots: Slots in use.
        num_places: Requests that can still be submitted before the queue is full; None where nobody counts.
        retry_after_seconds: When the queue is likely to have a place again, once it has none; for a caller who is alone in it.
        queue_seconds: How long a request that needs one slot is likely to wait for it if it comes now.
        cache_bytes_reserved: Memory that the caches have.
        cache_bytes_used: What rows in use take of it, as it was a few steps ago.
        steps: Decode steps since the last report.
        prefills: The encoder's work since the last report.
        without_claim: Callers who wait and for whom nobody would be pushed out if the queue were full, and when each is likely to
            have a place again; None if that is not told, because too many wait or because there are plenty of places.
        at_their_limit: Callers of whom no more may wait, as far as that is known, and when each is likely to have a place again.
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
    """A running request that will not need so many slots again: it holds fewer from now on."""

    id: int
    num_slots: int


class Report(Struct, frozen=True, array_like=True, tag="report"):
    """Everything the engine has to say to one front end since its last report; without events it is a sign of life.

    Attributes:
        tokens: New tokens of streamed requests.
        finished: Requests that ended.
        statistics: The engine, and what it did.
        scored: Pairs that ended.
        num_received: Requests (not pairs) that had come from this front end when `statistics` was made, ever.
        shrunk: Running requests that have given slots back.
    """

    tokens: list[Tokens]
    finished: list[Finished]
    statistics: Statistics
    scored: list[Scored] = []
    num_received: int = 0
    shrunk: list[Shrunk] = []


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start; the process exits.

    Attributes:
        reason: One line for the operator.
    """

    reason: str


class Down(Struct, frozen=True, array_like=True, tag="down"):
    """The last replica of a model is gone, and with it all that ran or waited; `Ready` follows once there is one again.

    Attributes:
        reason: For callers.
        retry_after_seconds: When one is likely to be there again, at the earliest.
    """

    reason: str
    retry_after_seconds: float


Event = Ready | Report | Snapshot | Fatal | Down
