"""The engine's state of one request."""

from dataclasses import dataclass, field

from dragoman.server.engine.messages import Answer, Finished, FinishReason, Request
from dragoman.server.engine.search.search import Search


@dataclass(slots=True, eq=False)
class Sequence:
    """Engine state of one request.

    Attributes:
        request: Validated input.
        num_slots: Rows it may hold from now on; they are kept for it while it runs.
        rows: Rows of the decode batch it holds, one a live hypothesis; empty unless running.
        search: Chooses its tokens; None for plain greedy search, or unless running.
        num_streamed: Tokens reported before the end.
        admitted: Time at which it got its rows.
        prefill_seconds: Encoder time of the batch it was prefilled in.
        first_token: Time at which its first token was chosen.
        answers: Set when it ends.
    """

    request: Request
    num_slots: int = 0
    rows: list[int] = field(default_factory=list)
    search: Search | None = None
    num_streamed: int = 0
    admitted: float | None = None
    prefill_seconds: float = 0.0
    first_token: float | None = None
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_slots = self.request.search.num_slots

    @property
    def num_source_tokens(self) -> int:
        """Tokens the encoder has to read."""
        return len(self.request.source_ids)

    def finished(self, reason: FinishReason, now: float, num_generated: int, incident: str = "") -> Finished:
        """Return the message of its end."""
        return Finished(
            id=self.request.id,
            reason=reason,
            answers=self.answers,
            num_generated=num_generated,
            admitted=self.admitted,
            prefill_seconds=self.prefill_seconds,
            first_token=self.first_token,
            ended=now,
            incident=incident,
        )
