"""Routes: which version of which model answers a request, and requests that wait for a model to load."""

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from dragoman.export.fields import one_line
from dragoman.server.errors import NotReady, UnknownModel, UnknownVersion
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.model_file import Sticky
from dragoman.server.models.use import Held, Use

_MAX_SHOWN_CHARACTERS = 80


def choose(shares: Mapping[str, float], key: str) -> str:
    """Return the version that answers the requests of a key: always the same one while the shares are the same.

    Over many keys each version gets its share. If one share changes while the others stay in proportion, keys move to or from that
    version only, as few as can. The choice needs nothing but its arguments, so that all processes agree on it: weighted rendezvous
    hashing (Schindelhauer and Schomaker, 2005).

    Args:
        shares: By version; at least one is above 0.
        key: What is to stay with a version, such as a request's id or a caller's name; with the model's in it, or the same callers
            get the canaries of all models.
    """
    candidates = [name for name, share in shares.items() if share > 0]
    assert candidates, "there is nobody to choose"
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda name: (-math.log(_draw(key, name)) / shares[name], name))


def _draw(key: str, name: str) -> float:
    """Return a number above 0 and at most 1, uniform over keys and names."""
    text = f"{len(name)}:{name}{key}".encode("utf-8", "surrogatepass")
    # As many bits as a float has.
    return ((int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) + 1) / (1 << 53)


def resolve(model: str, asked: str, contents: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """Return the name of the version that a request names.

    Args:
        model: Its name, for the message.
        asked: Name of a version, a label, or a content version; not empty.
        contents: Content version by name, of the versions that are served.
        labels: Name by label.

    Raises:
        UnknownVersion: If it is none of them, or different ones.
    """
    meant = {name for name, content in contents.items() if asked in (name, content)}
    if (labelled := labels.get(asked)) in contents:
        meant.add(str(labelled))
    if len(meant) == 1:
        return meant.pop()
    names = [name for name in contents if name in meant]
    served = [_described(name, content, labels) for name, content in contents.items()]
    raise UnknownVersion(
        model, one_line(asked, _MAX_SHOWN_CHARACTERS), served, [_described(name, contents[name], labels) for name in names]
    )


def _described(name: str, content: str, labels: Mapping[str, str]) -> str:
    """Return a version with all that it can be named by."""
    others = [content, *(label for label, version in labels.items() if version == name)]
    return f"{name} ({', '.join(others)})" if name else ", ".join(others)


USUAL_SECONDS = 30.0
# When to come again, where nothing is known of how long loading takes.
RETRY_SECONDS = 1.0
# So long it is believed that somebody comes again who was told to; then the model is loaded for nobody.
PROMISE_SECONDS = 60.0
# Of the time that a caller has, what is left for telling it that the model was not there in time.
MARGIN = 0.1
MAX_MARGIN_SECONDS = 0.25


class Waiting:
    """See above.

    Attributes:
        max_seconds: How long a request waits at the most.
        on_change: Called when other models are waited for than before.
    """

    def __init__(self, max_seconds: float = USUAL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nobody waiting.

        Args:
            max_seconds: How long a request waits at the most.
            clock: In seconds.
        """
        self.max_seconds = max_seconds
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        # Models that somebody has been told to come back for, and until when that is believed.
        self._promised: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._load_seconds: dict[str, float] = {}

    @property
    def names(self) -> frozenset[str]:
        """Models that are waited for, or that somebody comes back for who could not wait longer."""
        now = self._clock()
        return frozenset(self._waiting) | {name for name, until in self._promised.items() if until > now}

    def num_waiting(self, name: str) -> int:
        """Return how many requests wait for a model."""
        return len(self._waiting.get(name, ()))

    def end_of(self, seconds: float | None) -> float:
        """Return until when a request may wait that has so long until its deadline; None for no deadline."""
        if seconds is None:
            return self._clock() + self.max_seconds
        return self._clock() + min(self.max_seconds, seconds - min(MAX_MARGIN_SECONDS, MARGIN * seconds))

    async def wait(self, name: str, until: float) -> None:
        """Wait until something has changed about a model; a caller that leaves meanwhile is forgotten.

        Args:
            name: Of the model.
            until: When it is too late, by the clock.

        Raises:
            NotReady: If nothing has by then, or the model cannot be loaded.
        """
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
        """Have those who wait for a model look again: it is answered for otherwise than before."""
        self._drop_promise(name)
        if (began := self._began.pop(name, None)) is not None:
            self._load_seconds[name] = self._clock() - began
        for future in self._waiting.get(name, ()):
            if not future.done():
                future.set_result(None)

    def refuse(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Tell those who wait for a model that it cannot be loaded."""
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
        """Have a model be loaded for who was told to come back; not for ever, it may not come."""
        self._promised[name] = self._clock() + PROMISE_SECONDS
        asyncio.get_running_loop().call_later(PROMISE_SECONDS, self._forget_promise, name)

    def _drop_promise(self, name: str) -> None:
        """Believe no longer that somebody comes back for a model: it has been loaded, or cannot be."""
        if self._promised.pop(name, None) is not None and name not in self._waiting:
            self.on_change()

    def _forget_promise(self, name: str) -> None:
        until = self._promised.get(name)
        if until is not None and until <= self._clock():
            del self._promised[name]
            self.on_change()

    def _retry_seconds(self, name: str) -> float:
        """Return what is left of loading, if it takes as long as the last time."""
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
    """How the requests for one model are answered; it never changes, a new one takes its place.

    Attributes:
        default: The version that a model is described by, and that answers where none is named and none has a share.
        versions: All that requests can get, by what their folders call them.
        shares: Of the requests that name no version, by version; empty for all to the default.
        labels: Versions by their labels.
        sticky: What of a request decides which share it is in.
        is_stand_in: Whether nobody answers for now: who names another version than the default is told to come back, too.
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
        """Return what there is to tell of each version."""
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
        """Return a version: what a label says, what a folder is called, or what content gives; the default for an empty one.

        Raises:
            UnknownVersion: If there is no such version.
            NotReady: If there may be soon.
        """
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
        """Return the version that is to answer a request.

        Raises:
            UnknownVersion: As `find`, as the next.
            NotReady: As `find`.
        """
        if version or not self.shares:
            return self.find(version)
        key = caller if self.sticky == "caller" and caller else request_id
        return self.versions[choose(self.shares, f"{self.name}/{key}")]


class Repository:
    """See above; whoever changes routes does so between two turns of the event loop.

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
        """Have requests that come from now on be answered so; None takes the model away."""
        if route == self._routes.get(name):
            return
        routes = {key: value for key, value in self._routes.items() if key != name}
        if route is not None:
            routes[name] = route
        self._routes = {key: routes[key] for key in sorted(routes)}
        self.waiting.change(name)

    def find(self, name: str) -> Route | None:
        """Return how a model's requests are answered; None if there is no such model."""
        return self._routes.get(name)

    def route(self, name: str) -> Route:
        """Return how a model's requests are answered; the empty name means the only model.

        Raises:
            UnknownModel: Listing what is served.
        """
        if not name and len(self._routes) == 1:
            return next(iter(self._routes.values()))
        try:
            return self._routes[name]
        except KeyError:
            raise UnknownModel(name, list(self._routes)) from None

    def get(self, name: str, version: str = "") -> LoadedModel:
        """Return a model to describe; the empty name means the only one, the empty version the policy's choice.

        Raises:
            UnknownModel: Listing what is served.
            UnknownVersion: Listing what of the model is.
            NotReady: If that is not known for now.
        """
        return self.route(name).find(version)

    def served(self, name: str) -> Sequence[ServedVersion]:
        """Return the versions of a model that requests can get, in the order of its route.

        Raises:
            UnknownModel: Listing what is served.
        """
        return self.route(name).described()

    def all(self) -> Sequence[LoadedModel]:
        """Return every model, sorted by name, each in the version that its policy prefers."""
        return [route.default for route in self._routes.values()]

    def versions(self) -> Sequence[LoadedModel]:
        """Return every version of every model that requests can get."""
        return [model for route in self._routes.values() for model in route.versions.values()]

    def hold(
        self, name: str, version: str = "", request_id: str = "", caller: str = "", seconds: float | None = None
    ) -> AbstractAsyncContextManager[LoadedModel]:
        """Hold a version of a model, chosen when the `with` is entered; it does not end before the `with` is left.

        A model that is asleep is waited for, at most as long as the server's settings allow.

        Args:
            name: Of the model; empty for the only one.
            version: Its folder's name, its content's, or a label; empty for the policy's choice.
            request_id: Where versions have shares, the same id gets the same version.
            caller: Name of the request's caller, for policies by which the same caller gets the same version.
            seconds: Until the request's deadline; None if it has none.

        Raises:
            UnknownModel: As `get`.
            UnknownVersion: As `get`.
            NotReady: If it is asleep, and is not there in time.
        """
        until: float | None = None

        def choose_one() -> tuple[LoadedModel, Use]:
            model = self.route(name).choose(version, request_id, caller)
            return model, model.use

        def until_awake(model: LoadedModel) -> Awaitable[None] | None:
            nonlocal until
            if not model.is_asleep:
                return None
            if until is None:
                until = self.waiting.end_of(seconds)
            return self.waiting.wait(model.name, until)

        return Held(choose_one, until_awake)
