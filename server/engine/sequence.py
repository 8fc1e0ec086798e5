"""A request while the engine has it: where it came from, which rows it holds, and when things happened to it."""

from dataclasses import dataclass, field

from server.engine.messages import Finished, FinishReason, Request

Key = tuple[bytes, int]


@dataclass(slots=True, eq=False)
class Sequence:
    """Engine state of one request.

    Attributes:
        origin: Identity of the front end that sent it.
        request: What was asked.
        rows: Rows of the decode batch it holds, one a hypothesis; empty unless running.
        admitted: When it got its rows.
        prefill_seconds: Encoder time of the batch it was prefilled in.
        first_token: When its first token was chosen.
        token_ids: Its answer, set when it ends; end-of-sequence not included.
        num_generated: Tokens generated, end-of-sequence included.
    """

    origin: bytes
    request: Request
    rows: list[int] = field(default_factory=list)
    admitted: float | None = None
    prefill_seconds: float = 0.0
    first_token: float | None = None
    token_ids: list[int] = field(default_factory=list)
    num_generated: int = 0

    @property
    def key(self) -> Key:
        """What identifies it across all front ends."""
        return self.origin, self.request.id

    @property
    def num_slots(self) -> int:
        """Rows it needs: one, for greedy search."""
        return 1

    @property
    def num_source_tokens(self) -> int:
        """Tokens the encoder has to read."""
        return len(self.request.source_ids)

    def finished(self, reason: FinishReason, now: float, incident: str = "", retry_after_seconds: float = 0.0) -> Finished:
        """Describe its end."""
        return Finished(
            id=self.request.id,
            reason=reason,
            token_ids=self.token_ids,
            num_generated=self.num_generated,
            admitted=self.admitted,
            prefill_seconds=self.prefill_seconds,
            first_token=self.first_token,
            ended=now,
            incident=incident,
            retry_after_seconds=retry_after_seconds,
        )
