"""What the core needs from the rest of the server: engines and models. It owns no implementation of either."""

from asyncio import Future
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine import messages
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.service.languages import Frames

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest


class Engine(Protocol):
    """One model's engine, seen from the event loop."""

    def ensure_place(self, share: messages.Share) -> None:
        """Do nothing if the engine's queue probably has a place for a request.

        Args:
            share: Whose it is.

        Raises:
            QueueFull: If it has none.
            Unavailable: If the engine is down.
        """
        ...

    async def generate(self, request: messages.Request) -> messages.Finished:
        """Return how the request ended; cancelling the awaiting task cancels the request in the engine.

        Raises:
            Unavailable: If the engine is down or dies.
        """
        ...

    def stream(self, request: messages.Request) -> AsyncIterator[messages.Tokens | messages.Finished]:
        """Yield new tokens as they come, then the one `Finished`; closing it early (`aclose`) cancels the request in the engine.

        Raises:
            Unavailable: If the engine is down or dies.
        """
        ...

    async def score(self, request: messages.ScoreRequest) -> messages.Scored:
        """Return how a pair ended; cancelling the awaiting task cancels it in the engine.

        Raises:
            Unavailable: If the engine is down or dies.
        """
        ...

    def statistics(self) -> messages.Statistics:
        """Return what it said of itself last, a moment ago while anything runs.

        Raises:
            Unavailable: If the engine is down.
        """
        ...

    def watch(self) -> "Future[Snapshot]":
        """Ask what every slot does, unless that is asked already; return what will have the answer, and is not to be cancelled.

        Raises:
            Unavailable: If the engine is down; the future fails with it if that goes before it answers.
        """
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests now."""
        ...

    def next_id(self) -> int:
        """Return an id that no other request of this front end has."""
        ...


class ServedVersion(NamedTuple):
    """A version of a model that requests can get.

    Attributes:
        name: What its folder calls it, or what its content gives.
        version: What its content gives.
        labels: By which requests may name it too, sorted.
        share: Of the requests that name no version, how many get this one; 0 to 1.
        is_default: Whether it is the one that the policy prefers.
    """

    name: str
    version: str
    labels: tuple[str, ...] = ()
    share: float = 1.0
    is_default: bool = True


class Limited(Protocol):
    """What of a model limits what can be asked of it."""

    @property
    def name(self) -> str:
        """Name, as requests give it."""
        ...

    @property
    def manifest(self) -> "Manifest":
        """What the bundle says about itself."""
        ...

    @property
    def max_slots_per_request(self) -> int:
        """Sequences decoded at once that one request may take: its beams or answers."""
        ...


class Traits(Struct, frozen=True, array_like=True):
    """What a model has of its own that the server has no setting for.

    Attributes:
        max_priority: Highest priority that a request for it may have; None for any.
        is_ready_needed: Whether the server is ready only while it is; None for what `ready_when` says.
        one_sentence: Whether it knows one sentence at a time; None for what the bundle says.
    """

    max_priority: int | None = None
    is_ready_needed: bool | None = None
    one_sentence: bool | None = None


NO_TRAITS = Traits()


class Outcomes(Protocol):
    """What became of requests."""

    @property
    def num_answered(self) -> int:
        """Those that were answered."""
        ...

    @property
    def num_failed(self) -> int:
        """Those that failed through the server's fault."""
        ...

    @property
    def seconds(self) -> float:
        """What the answered ones took together."""
        ...

    @property
    def queue_seconds(self) -> float:
        """Seconds that they waited for slots of it."""
        ...


class Model(Limited, Protocol):
    """A loaded bundle and the engine that runs it."""

    @property
    def label(self) -> str:
        """What its folder calls the version; where folders have none, what the content gives."""
        ...

    def card(self) -> str:
        """Read the bundle's card, in Markdown, from its file; empty if it has none."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether it stands for a version that is loaded when a request comes for it."""
        ...

    @property
    def traits(self) -> Traits:
        """What it has of its own."""
        ...

    @property
    def version(self) -> str:
        """Version of the bundle."""
        ...

    @property
    def tokenizers(self) -> Tokenizers:
        """The bundle's tokenisers."""
        ...

    @property
    def frames(self) -> Frames:
        """What is said to it around a text."""
        ...

    @property
    def engine(self) -> Engine:
        """Its engine."""
        ...

    @property
    def device(self) -> str:
        """What it runs on, for example `cpu`."""
        ...

    @property
    def num_engines(self) -> int:
        """Engines that share its requests."""
        ...

    @property
    def max_slots(self) -> int:
        """Sequences decoded at once, by all of them."""
        ...

    @property
    def outcomes(self) -> Outcomes:
        """What became of the requests that this process has had for it."""
        ...

    def count_queued(self, seconds: float) -> None:
        """Count how long a request that was answered has waited for a slot."""
        ...


class Models(Protocol):
    """The models that are loaded now, each in one version or more."""

    def get(self, name: str, version: str = "") -> Model:
        """Return a model to look at; the empty name means the only one, the empty version the one that its policy prefers.

        Raises:
            UnknownModel: If there is no such model, or if the name is empty and there is not exactly one.
            UnknownVersion: If the model is not served in this version.
            NotReady: If none of its versions can answer for now, and this may be one of them.
        """
        ...

    def served(self, name: str) -> Sequence[ServedVersion]:
        """Return the versions of a model that requests can get, in the order of its route.

        Raises:
            UnknownModel: If there is no such model.
        """
        ...

    def all(self) -> Sequence[Model]:
        """Return every model, sorted by name, in the version that its policy prefers."""
        ...

    def versions(self) -> Sequence[Model]:
        """Return every version of every model that requests can get, sorted by the models' names."""
        ...

    def hold(
        self, name: str, version: str = "", request_id: str = "", caller: str = "", seconds: float | None = None
    ) -> AbstractAsyncContextManager[Model]:
        """Give a model to use: which version that is is decided when the `with` is entered, and none ends before it is left.

        A model that is asleep is waited for, at most as long as the server's settings say.

        Args:
            name: Of the model; empty for the only one.
            version: Its folder's name, what its content gives, or a label; empty for the policy's choice.
            request_id: Where versions have shares, the same id gets the same version.
            caller: Name of whose request it is, for policies by which the same caller gets the same version.
            seconds: Until the request's deadline; None if it has none.

        Raises:
            UnknownModel: As `get`.
            UnknownVersion: As `get`.
            NotReady: If it is asleep, and is not there in time.
        """
        ...
