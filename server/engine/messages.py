"""What crosses the border between a front end and an engine process: msgspec structs, MessagePack on the wire.

Times are `time.monotonic()` seconds: both processes are on one machine and share that clock.
"""

from typing import Literal

from msgspec import Struct

FinishReason = Literal["eos", "length", "cancelled", "deadline", "queue_full", "step_failed", "draining"]


class Request(Struct, frozen=True, array_like=True):
    """Validated client input.

    Attributes:
        id: Unique within the front end that sends it.
        source_ids: Source tokens, end-of-sequence included.
        max_new_tokens: Tokens to generate at the most, end-of-sequence included.
        arrival: When the front end received it.
        deadline: When the answer is no longer wanted; None for never.
        is_streamed: Whether tokens are reported as they come.
        priority: Higher is admitted first.
    """

    id: int
    source_ids: list[int]
    max_new_tokens: int
    arrival: float
    deadline: float | None = None
    is_streamed: bool = False
    priority: int = 0


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """A front end attaches; the engine answers `Ready` once it is, or `Fatal`."""


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """New requests, in order of arrival."""

    requests: list[Request]


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Requests nobody waits for any more; unknown ids are ignored, for they may have just finished."""

    ids: list[int]


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """End the process; whatever still runs ends as `draining`."""


Command = Hello | Submit | Cancel | Stop


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine has loaded and warmed up.

    Attributes:
        device: For example `cpu`.
        max_slots: Rows of the decode batch.
        load_seconds: Time to load the bundle and to warm up.
    """

    device: str
    max_slots: int
    load_seconds: float


class Finished(Struct, frozen=True, array_like=True):
    """How a request ended; each accepted request gets exactly one.

    Attributes:
        id: Of the request.
        reason: Why; `eos` and `length` are answers, everything else is an error.
        token_ids: Generated tokens, end-of-sequence not included (in full, also when they were streamed).
        num_generated: Generated tokens, end-of-sequence included.
        admitted: When it got its slots; None if it never did.
        prefill_seconds: Encoder time of the batch it was prefilled in.
        first_token: When its first token was chosen; None if there was none.
        ended: When it ended.
        incident: Id to quote for `step_failed`, as in the log; empty otherwise.
        retry_after_seconds: For `queue_full`: when a place is likely.
    """

    id: int
    reason: FinishReason
    token_ids: list[int]
    num_generated: int
    admitted: float | None
    prefill_seconds: float
    first_token: float | None
    ended: float
    incident: str = ""
    retry_after_seconds: float = 0.0


class Tokens(Struct, frozen=True, array_like=True):
    """New tokens of a streamed request."""

    id: int
    token_ids: list[int]


class Statistics(Struct, frozen=True, array_like=True):
    """The engine after a step.

    Attributes:
        num_waiting: Requests not yet admitted.
        num_waiting_tokens: Source tokens of those.
        num_running: Requests in slots.
        num_slots: Slots in use.
        step_rows: Rows decoded in this step; 0 when there was no step.
        step_seconds: Duration of the decode step, search included.
        prefill_rows: Sources encoded in this step.
        prefill_tokens: Their tokens.
        prefill_padded_tokens: The same with padding.
        prefill_seconds: Duration of the encoder pass.
    """

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_running: int = 0
    num_slots: int = 0
    step_rows: int = 0
    step_seconds: float = 0.0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_padded_tokens: int = 0
    prefill_seconds: float = 0.0


class Report(Struct, frozen=True, array_like=True, tag="report"):
    """Everything one engine iteration has to say to one front end; without events it is a sign of life."""

    tokens: list[Tokens]
    finished: list[Finished]
    statistics: Statistics


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start; the process exits.

    Attributes:
        reason: One line for the operator.
    """

    reason: str


Event = Ready | Report | Fatal
