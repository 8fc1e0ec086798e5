"""A request while the engine has it: where it came from, which rows it holds, and when things happened to it."""

from dataclasses import dataclass, field

from dragoman.server.engine.messages import Answer, Finished, FinishReason, Request
from dragoman.server.engine.search.search import Search

Key = tuple[bytes, int]


@dataclass(slots=True, eq=False)
class Sequence:
    """Engine state of one request.

    Attributes:
        origin: Identity of the front end that sent it.
        request: What was asked.
        num_slots: Rows it may hold from now on; they are kept for it while it runs.
        rows: Rows of the decode batch it holds, one a live hypothesis; empty unless running.
        search: How its tokens are chosen; None for plain greedy search, or unless running.
        num_streamed: Tokens reported before the end.
        admitted: When it got its rows.
        prefill_seconds: Encoder time of the batch it was prefilled in.
        first_token: When its first token was chosen.
        answers: Set when it ends.
        num_generated: Set when it ends, see `Finished`.
    """

    origin: bytes
    request: Request
    num_slots: int = 0
    rows: list[int] = field(default_factory=list)
    search: Search | None = None
    num_streamed: int = 0
    admitted: float | None = None
    prefill_seconds: float = 0.0
    first_token: float | None = None
    answers: list[Answer] = field(default_factory=list)
    num_generated: int = 0

    def __post_init__(self) -> None:
        self.num_slots = self.request.search.num_slots

    @property
    def key(self) -> Key:
        """What identifies it across all front ends."""
        return self.origin, self.request.id

    @property
    def num_source_tokens(self) -> int:
        """Tokens the encoder has to read."""
        return len(self.request.source_ids)

    @property
    def min_steps(self) -> int:
        """Decode steps it takes at the least."""
        search = self.request.search
        return len(search.forced_prefix) + search.min_new_tokens + 1

    def finished(
        self,
        reason: FinishReason,
        now: float,
        *,
        incident: str = "",
        retry_after_seconds: float = 0.0,
        needed_seconds: float = 0.0,
        limit: str = "",
    ) -> Finished:
        """Describe its end."""
        return Finished(
            id=self.request.id,
            reason=reason,
            answers=self.answers,
            num_generated=self.num_generated,
            admitted=self.admitted,
            prefill_seconds=self.prefill_seconds,
            first_token=self.first_token,
            ended=now,
            incident=incident,
            retry_after_seconds=retry_after_seconds,
            needed_seconds=needed_seconds,
            limit=limit,
        )
