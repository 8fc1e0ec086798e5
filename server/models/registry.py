"""Routes, which map requests to versions, and the queue of requests that wait for a model to load."""

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
    """Return the version for a key, by weighted rendezvous hashing (Schindelhauer and Schomaker, 2005).

    All processes choose the same. If one share changes, only the minimum of keys move, to or from that version. A key includes the
    model's name, so that the same callers do not get the canaries of all models.
    """
    candidates = [name for name, share in shares.items() if share > 0]
    assert candidates, "no version has a share"
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda name: (-math.log(_draw(key, name)) / shares[name], name))


def _draw(key: str, name: str) -> float:
    """Return a number above 0 and at most 1, uniform over keys and names."""
    text = f"{len(name)}:{name}{key}".encode("utf-8", "surrogatepass")
    # 53 bits, the precision of a float.
    return ((int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) + 1) / (1 << 53)


def resolve(model: str, asked: str, contents: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """Return the name of the one version with this name, label or content hash; raise `UnknownVersion` if none or several match."""
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
    others = [content, *(label for label, version in labels.items() if version == name)]
    return f"{name} ({', '.join(others)})" if name else ", ".join(others)


USUAL_SECONDS = 30.0
# Retry-after time while the duration of a load is unknown.
RETRY_SECONDS = 1.0
# Time for which a model counts as awaited after a caller got a retry-after time.
PROMISE_SECONDS = 60.0
# Fraction of a request's time, and its bound, that is kept for the rejection.
MARGIN = 0.1
MAX_MARGIN_SECONDS = 0.25


class Waiting:
    """Requests of this process that wait for a model to be loaded; `on_change` is called when the awaited models change."""

    def __init__(self, max_seconds: float = USUAL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_seconds = max_seconds
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        # Models with a caller that got a retry-after time, and the time until which they count as awaited.
        self._promised: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._load_seconds: dict[str, float] = {}

    @property
    def names(self) -> frozenset[str]:
        """Models that requests wait for, or whose callers got a retry-after time lately."""
        now = self._clock()
        return frozenset(self._waiting) | {name for name, until in self._promised.items() if until > now}

    def num_waiting(self, name: str) -> int:
        """Return the number of requests that wait for a model."""
        return len(self._waiting.get(name, ()))

    def end_of(self, seconds: float | None) -> float:
        """Return the time until which a request with this time to its deadline may wait; None for no deadline."""
        if seconds is None:
            return self._clock() + self.max_seconds
        return self._clock() + min(self.max_seconds, seconds - min(MAX_MARGIN_SECONDS, MARGIN * seconds))

    async def wait(self, name: str, until: float) -> None:
        """Wait until a model's route has changed; raise `NotReady` at `until`, or if the model cannot be loaded."""
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
        """Release the requests for a model: its route has changed."""
        self._drop_promise(name)
        if (began := self._began.pop(name, None)) is not None:
            self._load_seconds[name] = self._clock() - began
        for future in self._waiting.get(name, ()):
            if not future.done():
                future.set_result(None)

    def refuse(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Fail the requests for a model that cannot be loaded."""
        self._drop_promise(name)
        self._began.pop(name, None)
        for future in self._waiting.get(name, ()):
            if not future.done():
                future.set_exception(NotReady(f"model {name!r} cannot be loaded: {reason}", retry_after_seconds))

    def _leave(self, name: str, future: asyncio.Future[None]) -> None:
        if future.done() and not future.cancelled():
            future.exception()  # retrieved, even if the request was cancelled at the same moment
        waiting = self._waiting[name]
        del waiting[future]
        if not waiting:
            del self._waiting[name]
            if name not in self._promised:
                self._began.pop(name, None)
            self.on_change()

    def _promise(self, name: str) -> None:
        """Count a model as awaited after a caller got a retry-after time."""
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
        """Return the remaining load time, if the load takes as long as the last one."""
        usual, began = self._load_seconds.get(name), self._began.get(name)
        if usual is None or began is None:
            return RETRY_SECONDS
        return max(RETRY_SECONDS, usual - (self._clock() - began))


class CannotServe(Exception):
    """A frontend cannot serve a version; the message gives the reason."""


class ServedVersion(NamedTuple):
    """A version of a model that requests can use."""

    name: str  # name of its folder, or the content hash
    version: str  # content hash
    labels: tuple[str, ...] = ()  # sorted
    share: float = 1.0  # fraction of the requests without a version that it answers
    is_default: bool = True  # whether it is the policy's default


@dataclass(frozen=True, slots=True)
class Route:
    """Mapping of one model's requests to versions."""

    default: LoadedModel  # version that describes the model, and answers requests without a version where `shares` is empty
    versions: Mapping[str, LoadedModel]  # versions by `LoadedModel.label`
    shares: Mapping[str, float] = field(default_factory=dict)  # fraction of the requests without a version, by version
    labels: Mapping[str, str] = field(default_factory=dict)  # version by operators' label
    sticky: Sticky = "request"  # property of a request that selects its version
    is_stand_in: bool = False  # whether requests are rejected for now

    @classmethod
    def to(cls, model: LoadedModel, *, is_stand_in: bool = False) -> "Route":
        """Return the route of a model with one version."""
        return cls(model, {model.label: model}, is_stand_in=is_stand_in)

    @property
    def name(self) -> str:
        """Name of the model."""
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
        """Return a version by any of its names, empty for the default; raise `UnknownVersion`, or for a stand-in `NotReady`."""
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
        """Return the version for a request; raise as `find`."""
        if version or not self.shares:
            return self.find(version)
        key = caller if self.sticky == "caller" and caller else request_id
        return self.versions[choose(self.shares, f"{self.name}/{key}")]


class ModelRegistry:
    """Routes of all models of this process; `publish` replaces a route atomically on the event loop."""

    def __init__(self, models: Iterable[LoadedModel] = ()) -> None:
        self.waiting = Waiting()
        self._routes: dict[str, Route] = {}
        for model in models:
            self.publish(model.name, Route.to(model))

    def publish(self, name: str, route: Route | None) -> None:
        """Route later requests for a model; None removes the model."""
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
        """Return the route of a model, or of the only one for an empty name; raise `UnknownModel`."""
        if not name and len(self._routes) == 1:
            return next(iter(self._routes.values()))
        try:
            return self._routes[name]
        except KeyError:
            raise UnknownModel(name, list(self._routes)) from None

    def get(self, name: str, version: str = "") -> LoadedModel:
        """Return a version of a model, the default for an empty one; raise as `route` and `Route.find`."""
        return self.route(name).find(version)

    def served(self, name: str) -> Sequence[ServedVersion]:
        """Return the versions of a model that requests can use; raise as `route`."""
        return self.route(name).described()

    def all(self) -> Sequence[LoadedModel]:
        """Return the default version of every model, sorted by name."""
        return [route.default for route in self._routes.values()]

    def versions(self) -> Sequence[LoadedModel]:
        """Return every version of every model that requests can use."""
        return [model for route in self._routes.values() for model in route.versions.values()]

    def hold(self, name: str, version: str = "", request_id: str = "", caller: str = "", seconds: float | None = None) -> "Held":
        """Return a context manager that holds a version, chosen on entry (after the load of a sleeping model), until its exit.

        Versions with shares are chosen by `request_id`, or by `caller` if sticky by caller; `seconds` is the time to the deadline.
        """
        return Held(self, name, version, request_id, caller, seconds)


class Held(AbstractAsyncContextManager[LoadedModel, None]):
    """Context manager of `ModelRegistry.hold`."""

    __slots__ = ("_asked", "_began", "_name", "_repository", "_seconds", "_use", "is_cached")

    def __init__(
        self, repository: ModelRegistry, name: str, version: str, request_id: str, caller: str, seconds: float | None
    ) -> None:
        self._repository, self._name, self._asked, self._seconds = repository, name, (version, request_id, caller), seconds
        self.is_cached = False  # whether the request was answered from the result cache

    async def __aenter__(self) -> LoadedModel:
        """Choose and hold without a suspension between the two: the version cannot end in between."""
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
        self._use.leave(time.monotonic() - self._began, error, is_cached=self.is_cached)
