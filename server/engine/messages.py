"""Messages between frontend processes, dispatcher and engines: msgspec structs, MessagePack on the wire.

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
    """Sampling of tokens.

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
    """Options of a search; the defaults are greedy search. Formulas are in docs/api.md.

    Attributes:
        num_beams: Hypotheses of beam search; 1 for none.
        num_answers: Answers wanted: of the beams, drawn, or alternatives.
        length_penalty: Exponent of the length in a score.
        is_stopped_early: Whether beam search ends as soon as `num_beams` hypotheses are finished.
        sampling: Of the tokens; None to take the likeliest.
        has_alternatives: Whether answers begin, after the forced prefix, with the `num_answers` likeliest tokens.
        min_new_tokens: Tokens generated before end-of-sequence may be.
        repetition_penalty: Factor of the log-probabilities of tokens that the answer has already.
        no_repeat_ngram_size: Length of token sequences that may not occur twice; 0 for no such rule.
        suppressed_tokens: Never generated.
        forced_prefix: Tokens the answer starts with; not counted in `max_new_tokens`.
        num_top_log_probs: Likeliest tokens reported for each position.
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
    """The caller of a request, and its part of the engines.

    Attributes:
        caller: Name; requests of unknown callers are all of one caller, the empty name.
        weight: Among waiting callers, the proportions in which the engines' work is divided; 10^-9 to 10^9.
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
        arrival: Time at which the front end received it.
        deadline: Time at which the answer is no longer wanted; None for never.
        is_streamed: Whether tokens are reported as they come.
        priority: Higher is served first.
        search: Options of the search.
        share: Its caller.
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
    """A validated request for the scores of a target.

    Attributes:
        id: Unique within the front end, among `Request`s too.
        source_ids: Source tokens, end-of-sequence included.
        target_ids: Target tokens, end-of-sequence included.
        arrival: Time at which the front end received it.
        deadline: Time at which the answer is no longer wanted; None for never.
        priority: Higher is scored first.
        is_aligned: Whether the alignment matrix is wanted.
        alignment_layer: Decoder layer it is taken from; None for the mean of all.
        share: Its caller.
        decoder_start_id: First token fed to the decoder; None for the model's.
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
    """Attach to an engine or a dispatcher; it answers `Ready` once it is, an engine perhaps `Fatal`."""


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """New requests, in order of arrival."""

    requests: list[Request]


class Score(Struct, frozen=True, array_like=True, tag="score"):
    """New score requests, in order of arrival."""

    requests: list[ScoreRequest]


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Requests to end; unknown ids are ignored, for they may have just finished."""

    ids: list[int]


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """End the process; requests that still run end as `draining`."""


Command = Hello | Submit | Score | Cancel | Watch | Stop


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine has been loaded and warmed up.

    Attributes:
        device: For example `cpu`.
        max_slots: Rows of the decode batch.
        load_seconds: Time to load the bundle and to warm up.
        platform: Of its process, which decides the bits of answers where `device` is the CPU.
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
        score: Rank of beams: the sum of the log-probabilities as the search saw them, over length^length_penalty;
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
    """The end of a request; each accepted request gets exactly one.

    Attributes:
        id: Of the request.
        reason: `eos` and `length`, the first answer's, are answers, everything else is an error.
        answers: In the order of the answer's message (in full, also when they were streamed); none for an error.
        num_generated: Tokens generated for the answers, or until the error: end-of-sequence included, the forced prefix not.
        admitted: Time at which it got its slots; None if it never did.
        prefill_seconds: Encoder time of the batch it was prefilled in.
        first_token: Time at which its first token was chosen; None if there was none.
        ended: Time of the end.
        incident: Id to quote for `step_failed`, as in the log; empty otherwise.
        retry_after_seconds: For `queue_full`: until a place is likely; for `lost`: until a retry makes sense.
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
    """The end of a `ScoreRequest`; each gets exactly one.

    Attributes:
        id: Of the request.
        reason: `eos` for an answer, everything else is an error.
        log_probs: Of the target's tokens, end-of-sequence included.
        alignment: `[T, S]` float32 in row-major order, if asked for.
        ended: Time of the end.
        incident: See `Finished`.
        retry_after_seconds: See `Finished`; for `not_loaded`: until loading is tried again.
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
    """New tokens of a streamed request's first answer that no later step can change."""

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
    """Work of the encoder between two decode steps.

    Attributes:
        num_rows: Sources encoded.
        num_tokens: Their tokens.
        seconds: Its duration.
        num_admitted: Requests that got their slots; sources of waiting requests may have been encoded, too.
    """

    num_rows: int
    num_tokens: int
    seconds: float
    num_admitted: int


class Statistics(Struct, frozen=True, array_like=True):
    """State of an engine after an iteration and its work since the last report, or the state of a model with its queue.

    Attributes:
        num_waiting: Requests without slots.
        num_waiting_tokens: Source tokens of those.
        num_running: Requests in slots.
        num_slots: Slots in use.
        num_places: Requests that can still be submitted before the queue is full; None for an engine.
        retry_after_seconds: Time until a full queue is likely to have a place again, for a caller that is alone in it.
        queue_seconds: Time that a request that needs one slot is likely to wait for it if it comes now.
        cache_bytes_reserved: Memory that the caches have.
        cache_bytes_used: Of that, in use by rows a few steps ago.
        steps: Decode steps since the last report.
        prefills: The encoder's work since the last report.
        without_claim: Waiting callers that could evict nothing from a full queue, and the time until each is likely to have a place
            again; None if too many wait or there are plenty of places.
        at_their_limit: Callers of which no more requests may wait, as far as that is known, with the same time.
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
    """Events since the last report, of an engine or of a dispatcher to a front end; without events it is a sign of life.

    Attributes:
        tokens: New tokens of streamed requests.
        finished: Requests that ended.
        statistics: Of the sender.
        scored: Score requests that ended.
        num_received: Requests that a front end had ever sent when a dispatcher made `statistics`, without score requests.
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
    """The last engine of a model is gone, and with it all that ran or waited; `Ready` follows once there is one again.

    Attributes:
        retry_after_seconds: Hint for callers.
    """

    retry_after_seconds: float


Event = Ready | Report | Snapshot | Fatal | Down
