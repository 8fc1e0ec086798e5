"""What tests ask of every face of a server and what they are told, in words of no protocol."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

# Token, its text, its log-probability, and the likeliest at its place, each so.
LogProb: TypeAlias = tuple[int, bytes | str, float, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Query:
    """Texts, each to be answered by itself.

    Attributes:
        texts: As many as the way has them in one message.
        options: Fields of `dragoman.v1.GenerateRequest`, the same for all texts.
        model: Its name.
        languages: Of source and target, for a face that finds the model by them.
    """

    texts: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "en-de"
    languages: tuple[str, str] = ("en", "de")


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered to one text; None where the face does not say it.

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
    """A face has said no.

    Attributes:
        status: As its protocol has it.
        message: Why.
        retry_after_seconds: When to come back; None where that is not said.
    """

    def __init__(self, status: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(status, message, retry_after_seconds)
        self.status, self.message, self.retry_after_seconds = status, message, retry_after_seconds


class Method(NamedTuple):
    """One of the ways to ask a face.

    Attributes:
        ask: Asks, and returns what is told of each text.
        num_texts: That go together.
    """

    ask: Callable[[Query], Awaitable[list[Answer]]]
    num_texts: int = 1


class ProtocolClient(Protocol):
    """A caller of one face.

    Attributes:
        name: As the table of statuses in docs/http.md has it.
        methods: To ask it.
    """

    name: str
    methods: Mapping[str, Method]

    @classmethod
    def connect(cls, server: Any, token: str = "") -> AbstractAsyncContextManager["ProtocolClient"]:
        """Connect to a server, as somebody."""
        ...

    def supports(self, way: str, options: Mapping[str, Any]) -> bool:
        """Whether these options can be said to it in that way."""
        ...

    def project(self, answer: Answer) -> Answer:
        """Return what of a whole answer it carries."""
        ...

    async def call_unimplemented(self) -> None:
        """Ask for something that the protocol has, or could have, and the server has not."""
        ...


Opened: TypeAlias = AsyncIterator[Any]
