"""Engine state of one request."""

from dataclasses import dataclass, field

from dragoman.server.engine.messages import Answer, Finished, FinishReason, Request
from dragoman.server.engine.search.search import Search


@dataclass(slots=True, eq=False)
class Sequence:
    """Engine state of one request."""

    request: Request
    num_slots: int = 0  # rows reserved for it from now on
    rows: list[int] = field(default_factory=list)  # rows held, one for each live hypothesis; empty unless running
    search: Search | None = None  # None for plain greedy search, or unless running
    num_streamed: int = 0  # tokens reported before the end
    admitted: float | None = None  # time at which it got its rows
    prefill_seconds: float = 0.0  # duration of its prefill batch, or of reading its prompt
    first_token: float | None = None  # time of its first token
    answers: list[Answer] = field(default_factory=list)  # set when it ends

    def __post_init__(self) -> None:
        self.num_slots = self.request.search.num_slots

    @property
    def num_source_tokens(self) -> int:
        """Number of source tokens."""
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
