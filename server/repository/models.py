"""The models of one process: which version of each answers which request. It starts and ends none."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from dragoman.server.core.ports import ServedVersion
from dragoman.server.errors import NotReady, UnknownModel, UnknownVersion
from dragoman.server.repository.choosing import choose, resolve
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.model_file import Sticky
from dragoman.server.repository.use import Held, Use
from dragoman.server.repository.waiting import RETRY_SECONDS, Waiting


class CannotServe(Exception):
    """Requests cannot be answered by a version; the message says why."""


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
        """See `core.ports.Models`.

        Raises:
            UnknownModel: Listing what is served.
            UnknownVersion: Listing what of the model is.
            NotReady: If that is not known for now.
        """
        return self.route(name).find(version)

    def served(self, name: str) -> Sequence[ServedVersion]:
        """See `core.ports.Models`.

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
        """See `core.ports.Models`."""
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
