"""Routes: which version of which model answers a request, and requests that wait for a model to load."""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from dragoman.export.fields import one_line
from dragoman.server.errors import NotReady, UnknownModel, UnknownVersion
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.model_file import Sticky

MAX_SHOWN_CHARACTERS = 80


def choose(shares: Mapping[str, float], key: str) -> str:
    """Return the version that answers the requests of a key, by weighted rendezvous hashing (Schindelhauer and Schomaker, 2005).

    All processes choose the same, and if one share changes, as few keys as possible move, to or from that version only.

    Args:
        shares: By version; at least one is above 0.
        key: A request's id or a caller's name, with the model's: the same callers are not to get the canaries of all models.
    """
    candidates = [name for name, share in shares.items() if share > 0]
    assert candidates, "no version has a share"
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda name: (-math.log(_draw(key, name)) / shares[name], name))


def _draw(key: str, name: str) -> float:
    """Return a number above 0 and at most 1, uniform over keys and names."""
    text = f"{len(name)}:{name}{key}".encode("utf-8", "surrogatepass")
    # As many bits as a float has.
    return ((int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) + 1) / (1 << 53)


def resolve(model: str, asked: str, contents: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """Return the name of the version that a request names by that, by a label, or by its content.

    Args:
        model: Name of the model, for the message.
        asked: By the request; not empty.
        contents: Content by name, of the versions that are served.
        labels: Name by label.

    Raises:
        UnknownVersion: If there is none, or more than one.
    """
    found = {name for name, content in contents.items() if asked in (name, content)}
    if (labelled := labels.get(asked)) in contents:
        found.add(str(labelled))
    if len(found) == 1:
        return found.pop()
    names = [name for name in contents if name in found]
    served = [_described(name, content, labels) for name, content in contents.items()]
    raise UnknownVersion(
        model, one_line(asked, MAX_SHOWN_CHARACTERS), served, [_described(name, contents[name], labels) for name in names]
    )


def _described(name: str, content: str, labels: Mapping[str, str]) -> str:
    """Return a version with all its names."""
    others = [content, *(label for label, version in labels.items() if version == name)]
    return f"{name} ({', '.join(others)})" if name else ", ".join(others)


USUAL_SECONDS = 30.0
# Retry time told to callers while nothing is known of how long loading takes.
RETRY_SECONDS = 1.0
# A model counts as awaited for so long after a caller was told to come back.
PROMISE_SECONDS = 60.0
# Part of a caller's time, and its bound, that is kept for the refusal.
MARGIN = 0.1
MAX_MARGIN_SECONDS = 0.25


class Waiting:
    """Requests of this process that wait for a model to be loaded.

    Attributes:
        max_seconds: Longest time that a request waits.
        on_change: Called when other models are awaited than before.
    """

    def __init__(self, max_seconds: float = USUAL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without requests; `clock` returns seconds."""
        self.max_seconds = max_seconds
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        # Models for which a caller was told to come back, and until when they count as awaited.
        self._promised: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._load_seconds: dict[str, float] = {}

    @property
    def names(self) -> frozenset[str]:
        """Models that requests wait for, or for which a caller was told to come back."""
        now = self._clock()
        return frozenset(self._waiting) | {name for name, until in self._promised.items() if until > now}

    def num_waiting(self, name: str) -> int:
        """Return how many requests wait for a model."""
        return len(self._waiting.get(name, ()))

    def end_of(self, seconds: float | None) -> float:
        """Return until when a request may wait, by its time until the deadline; None for no deadline."""
        if seconds is None:
            return self._clock() + self.max_seconds
        return self._clock() + min(self.max_seconds, seconds - min(MAX_MARGIN_SECONDS, MARGIN * seconds))

    async def wait(self, name: str, until: float) -> None:
        """Wait until a model's route has changed; raise `NotReady` if it has not until then, or the model cannot be loaded."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if name not in self._waiting:
            self._began.setdefault(name, self._clock())
            self._waiting[name] = {future: None}
            self.on_change()
        else:
            self._waiting[name][future] = None
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await future
        except TimeoutError:
            self._promise(name)
            raise NotReady(f"model {name!r} is being loaded", retry_after_seconds=self._retry_seconds(name)) from None
        finally:
            self._leave(name, future)

    def change(self, name: str) -> None:
        """Let the requests for a model go on: its route has changed."""
        self._drop_promise(name)
        if (began := self._began.pop(name, None)) is not None:
            self._load_seconds[name] = self._clock() - began
        for future in self._waiting.get(name, ()):
            if not future.done():
                future.set_result(None)

    def refuse(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Refuse the requests for a model that cannot be loaded."""
        self._drop_promise(name)
        self._began.pop(name, None)
        for future in self._waiting.get(name, ()):
            if not future.done():
                future.set_exception(NotReady(f"model {name!r} cannot be loaded: {reason}", retry_after_seconds))

    def _leave(self, name: str, future: asyncio.Future[None]) -> None:
        if future.done() and not future.cancelled():
            future.exception()  # seen, even if the caller has left at the same moment
        waiting = self._waiting[name]
        del waiting[future]
        if not waiting:
            del self._waiting[name]
            if name not in self._promised:
                self._began.pop(name, None)
            self.on_change()

    def _promise(self, name: str) -> None:
        """Count a model as awaited for a caller that was told to come back."""
        self._promised[name] = self._clock() + PROMISE_SECONDS
        asyncio.get_running_loop().call_later(PROMISE_SECONDS, self._forget_promise, name)

    def _drop_promise(self, name: str) -> None:
        if self._promised.pop(name, None) is not None and name not in self._waiting:
            self.on_change()

    def _forget_promise(self, name: str) -> None:
        until = self._promised.get(name)
        if until is not None and until <= self._clock():
            del self._promised[name]
            self.on_change()

    def _retry_seconds(self, name: str) -> float:
        """Return the rest of the load, if it takes as long as the last one."""
        usual, began = self._load_seconds.get(name), self._began.get(name)
        if usual is None or began is None:
            return RETRY_SECONDS
        return max(RETRY_SECONDS, usual - (self._clock() - began))


class CannotServe(Exception):
    """Requests cannot be answered by a version; the message says why."""


class ServedVersion(NamedTuple):
    """A version of a model that requests can get.

    Attributes:
        name: Of its folder, or of its content.
        version: Of its content.
        labels: Labels that requests may name, sorted.
        share: Fraction of the requests without a version that it answers.
        is_default: Whether the policy prefers it.
    """

    name: str
    version: str
    labels: tuple[str, ...] = ()
    share: float = 1.0
    is_default: bool = True


@dataclass(frozen=True, slots=True)
class Route:
    """How the requests for one model are answered.

    Attributes:
        default: Version that describes the model, and answers requests that name none where none has a share.
        versions: All versions, by their labels.
        shares: Of the requests that name no version, by version; empty for all to the default.
        labels: Versions by further names.
        sticky: Part of a request that decides which version it gets.
        is_stand_in: Whether requests are refused for now.
    """

    default: LoadedModel
    versions: Mapping[str, LoadedModel]
    shares: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    sticky: Sticky = "request"
    is_stand_in: bool = False

    @classmethod
    def to(cls, model: LoadedModel, *, is_stand_in: bool = False) -> "Route":
        """Return the route of a model that has one version."""
        return cls(model, {model.label: model}, is_stand_in=is_stand_in)

    @property
    def name(self) -> str:
        """Of the model."""
        return self.default.name

    def described(self) -> list[ServedVersion]:
        """Return a description of each version."""
        return [
            ServedVersion(
                label,
                model.version,
                tuple(sorted(name for name, version in self.labels.items() if version == label)),
                self.shares.get(label, 0.0) if self.shares else float(model is self.default),
                model is self.default,
            )
            for label, model in self.versions.items()
        ]

    def find(self, version: str) -> LoadedModel:
        """Return a version by any of its names, the default for an empty one; raise `UnknownVersion`, or `NotReady` for now."""
        if not version:
            return self.default
        contents = {label: model.version for label, model in self.versions.items()}
        try:
            return self.versions[resolve(self.name, version, contents, self.labels)]
        except UnknownVersion:
            if not self.is_stand_in:
                raise
            raise NotReady(f"model {self.name!r} is not ready", RETRY_SECONDS) from None

    def choose(self, version: str, request_id: str, caller: str) -> LoadedModel:
        """Return the version that is to answer a request; raises as `find`."""
        if version or not self.shares:
            return self.find(version)
        key = caller if self.sticky == "caller" and caller else request_id
        return self.versions[choose(self.shares, f"{self.name}/{key}")]


class Repository:
    """Routes of all models of this process; a route changes between two turns of the event loop.

    Attributes:
        waiting: Requests for models that are asleep.
    """

    def __init__(self, models: Iterable[LoadedModel] = ()) -> None:
        """Start with models of one version each."""
        self.waiting = Waiting()
        self._routes: dict[str, Route] = {}
        for model in models:
            self.publish(model.name, Route.to(model))

    def publish(self, name: str, route: Route | None) -> None:
        """Answer a model's requests by a route from now on; None removes the model."""
        if route == self._routes.get(name):
            return
        routes = {key: value for key, value in self._routes.items() if key != name}
        if route is not None:
            routes[name] = route
        self._routes = {key: routes[key] for key in sorted(routes)}
        self.waiting.change(name)

    def find(self, name: str) -> Route | None:
        """Return the route of a model; None if there is no such model."""
        return self._routes.get(name)

    def route(self, name: str) -> Route:
        """Return the route of a model, of the only one for an empty name; raise `UnknownModel`."""
        if not name and len(self._routes) == 1:
            return next(iter(self._routes.values()))
        try:
            return self._routes[name]
        except KeyError:
            raise UnknownModel(name, list(self._routes)) from None

    def get(self, name: str, version: str = "") -> LoadedModel:
        """Return a version of a model, the default for an empty one; raises as `route` and `Route.find`."""
        return self.route(name).find(version)

    def served(self, name: str) -> Sequence[ServedVersion]:
        """Return the versions of a model that requests can get; raises as `route`."""
        return self.route(name).described()

    def all(self) -> Sequence[LoadedModel]:
        """Return the default version of every model, sorted by name."""
        return [route.default for route in self._routes.values()]

    def versions(self) -> Sequence[LoadedModel]:
        """Return every version of every model that requests can get."""
        return [model for route in self._routes.values() for model in route.versions.values()]

    def hold(self, name: str, version: str = "", request_id: str = "", caller: str = "", seconds: float | None = None) -> "Held":
        """Return a context in which a version of a model is held; it is chosen on entry, and does not end before the exit.

        A model that is asleep is waited for, at most as long as the settings say.

        Args:
            name: Of the model; empty for the only one.
            version: Any of its names; empty for the policy's choice.
            request_id: Where versions have shares, the same id gets the same version.
            caller: Name of the caller, where shares go by that.
            seconds: Time until the request's deadline; None if it has none.
        """
        return Held(self, name, version, request_id, caller, seconds)


class Held(AbstractAsyncContextManager[LoadedModel, None]):
    """Holds a version; see `Repository.hold`."""

    __slots__ = ("_asked", "_began", "_name", "_repository", "_seconds", "_use")

    def __init__(
        self, repository: Repository, name: str, version: str, request_id: str, caller: str, seconds: float | None
    ) -> None:
        self._repository, self._name, self._asked, self._seconds = repository, name, (version, request_id, caller), seconds

    async def __aenter__(self) -> LoadedModel:
        """Choose and hold in one turn of the event loop: the version cannot end in between."""
        repository, waiting = self._repository, self._repository.waiting
        model = repository.route(self._name).choose(*self._asked)
        if model.is_asleep:
            until = waiting.end_of(self._seconds)
            while model.is_asleep:
                await waiting.wait(model.name, until)
                model = repository.route(self._name).choose(*self._asked)
        self._use = model.use
        self._use.take()
        self._began = time.monotonic()
        return model

    async def __aexit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Release the version."""
        self._use.leave(time.monotonic() - self._began, error)
