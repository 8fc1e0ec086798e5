"""One client interface for every protocol of the server: the same queries, answers and refusals, in words of no protocol."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

# Token, its text, its log-probability, and the most likely tokens at its place, each so.
LogProb: TypeAlias = tuple[int, bytes | str, float, tuple[Any, ...]]
Connection: TypeAlias = AsyncIterator[Any]
NUM_TEXTS = 10
"""Texts in one message of a method of several."""


@dataclass(frozen=True, slots=True)
class Query:
    """Texts, as many as the method has in one message, each answered by itself, with the same options for all.

    Options are fields of `dragoman.v1.GenerateRequest`; `languages` are for a protocol that chooses the model by them.
    """

    texts: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "en-de"
    languages: tuple[str, str] = ("en", "de")
    request_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one text, the best hypothesis first; None where the protocol does not carry a field.

    `endings` are `eos` or `length`; `counts` are tokens of the source and tokens generated.
    """

    texts: list[str]
    scores: list[float] | None = None
    tokens: list[list[int]] | None = None
    endings: list[str] | None = None
    log_probs: list[list[LogProb]] | None = None
    counts: tuple[int, int] | None = None
    is_truncated: bool | None = None
    seed: int | None = None
    version: str | None = field(default=None, compare=False)


class Refused(Exception):
    def __init__(self, status: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(status, message, retry_after_seconds)
        self.status, self.message, self.retry_after_seconds = status, message, retry_after_seconds


class Method(NamedTuple):
    """A method of a protocol, and the number of texts in one of its messages."""

    call: Callable[[Query], Awaitable[list[Answer]]]
    num_texts: int = 1


class ProtocolClient:
    """A client of one protocol, whose name is that of its column in docs/api.md's table of statuses.

    Each has a class method `connect(server, token)`, an asynchronous context, and `call_unimplemented`.
    """

    name: str
    methods: Mapping[str, Method]
    connect: Any
    call_unimplemented: Any

    def supports(self, method: str, options: Mapping[str, Any]) -> bool:
        return True

    def project(self, answer: Answer) -> Answer:
        """Return the part of a complete answer that the protocol carries."""
        return answer
