"""One client interface for every protocol of the server: the same queries, answers and refusals, in words of no protocol."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

# Token, its text, its log-probability, and the most likely tokens at its place, each so.
LogProb: TypeAlias = tuple[int, bytes | str, float, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Query:
    """Texts, each to be answered by itself.

    Attributes:
        texts: As many as the method has in one message.
        options: Fields of `dragoman.v1.GenerateRequest`, the same for all texts.
        model: Its name.
        languages: Of source and target, for a protocol that chooses the model by them.
        request_id: Of the message; empty for none.
        headers: HTTP headers or gRPC metadata beside it.
        timeout_seconds: The client's deadline; None for none.
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
    """The answer to one text; None where the protocol does not carry a field.

    Attributes:
        texts: The answers, the best first.
        scores: Of each.
        tokens: Of each.
        endings: Of each, `eos` or `length`.
        log_probs: Of each, of each token.
        counts: Tokens of the source, tokens generated.
        is_truncated: Whether the source was cut.
        seed: Of samples.
    """

    texts: list[str]
    scores: list[float] | None = None
    tokens: list[list[int]] | None = None
    endings: list[str] | None = None
    log_probs: list[list[LogProb]] | None = None
    counts: tuple[int, int] | None = None
    is_truncated: bool | None = None
    seed: int | None = None


class Refused(Exception):
    """The server has refused or failed a query.

    Attributes:
        status: As the protocol has it.
        message: The reason.
        retry_after_seconds: When to try again; None without a hint.
    """

    def __init__(self, status: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(status, message, retry_after_seconds)
        self.status, self.message, self.retry_after_seconds = status, message, retry_after_seconds


class Method(NamedTuple):
    """A method of a protocol.

    Attributes:
        call: Send a query and return the answer to each text.
        num_texts: Texts in one message.
    """

    call: Callable[[Query], Awaitable[list[Answer]]]
    num_texts: int = 1


class ProtocolClient(Protocol):
    """A client of one protocol.

    Attributes:
        name: As in the table of statuses in docs/http.md.
        methods: By name.
    """

    name: str
    methods: Mapping[str, Method]

    @classmethod
    def connect(cls, server: Any, token: str = "") -> AbstractAsyncContextManager["ProtocolClient"]:
        """Connect to a server with a token."""
        ...

    def supports(self, method: str, options: Mapping[str, Any]) -> bool:
        """Return whether a method can carry these options."""
        ...

    def project(self, answer: Answer) -> Answer:
        """Return the part of a complete answer that the protocol carries."""
        ...

    async def call_unimplemented(self) -> None:
        """Call a method that the server does not offer."""
        ...


Connection: TypeAlias = AsyncIterator[Any]
