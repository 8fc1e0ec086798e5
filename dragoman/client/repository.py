"""Client of the admin service: the states of a server's models, and changes to them."""

import time
from dataclasses import asdict, dataclass, field, fields
from types import TracebackType
from typing import Any, Self

import grpc

from dragoman.client.calls import Calls
from dragoman.client.request import fill
from dragoman.client.retry import RetryPolicy
from dragoman.client.settings import ChannelOptions, Settings
from dragoman.v1 import repository_pb2, repository_pb2_grpc

# A change that is asked for again may be another one, such as a rollback.
_ONCE = RetryPolicy(max_attempts=1)
_PREFIX = "VERSION_STATE_"


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """A version of a model, as it is now; its fields are those of `RepositoryVersion` in the contract, `state` in lower case."""

    name: str
    version: str = ""
    state: str = "unspecified"
    since: float = 0.0
    cause: str = ""
    reason: str = ""
    labels: tuple[str, ...] = ()
    share: float = 0.0
    is_default: bool = False
    num_answered: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class Requested:
    """Requests of operators about a model since the server started; its fields are those of the contract."""

    is_unloaded: bool = False
    loaded: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    pinned: str = ""
    labels: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return any(asdict(self).values())


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model, as it is now; its fields are those of `RepositoryModel` in the contract."""

    name: str
    is_ready: bool = False
    versions: tuple[VersionStatus, ...] = ()
    problems: tuple[str, ...] = ()
    requested: Requested = field(default_factory=Requested)
    glossaries: tuple[str, ...] = ()


class RepositoryClient:
    """A connection to the admin service of a server; use it as a context manager. Nothing is tried twice.

    Args:
        target: Address of the service, which is not that of the server: `host:port`.
        timeout_seconds: Time for each call; a change that takes longer goes on all the same.
        token: Bearer token of an operator.
        credentials: For TLS; None for plain text.
        options: gRPC channel options by name.

    Every call raises `CallError`, by the gRPC status it ended with; what cannot be done has changed nothing.

    Raises:
        ValueError: If an argument cannot be used; the message begins with its name.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_seconds: float = 600.0,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        options: ChannelOptions | None = None,
    ) -> None:
        settings = Settings(target, timeout_seconds, _ONCE, token, options or {}, time.monotonic, credentials is not None)
        self._calls = Calls(settings)
        self._channel = settings.channel(grpc, credentials)
        self._stub = repository_pb2_grpc.RepositoryStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._calls.close()
        self._channel.close()

    def models(self, model: str = "") -> tuple[list[ModelStatus], str]:
        """Return how models are, all or one, and why the server could not look at their folder; empty if it could."""
        return _listed(self._call(self._stub.ListRepository, repository_pb2.ListRepositoryRequest(), model=model))

    def refresh(self) -> tuple[list[ModelStatus], str]:
        """Reconcile all models with their folders now; return as `models`, when all is done."""
        return _listed(self._call(self._stub.RefreshRepository, repository_pb2.RefreshRepositoryRequest()))

    def load(self, model: str, version: str = "") -> ModelStatus:
        """Load a version beside those of the policy; without one, those of the policy."""
        return _model(self._call(self._stub.LoadModel, repository_pb2.LoadModelRequest(), model=model, version=version))

    def unload(self, model: str, version: str = "") -> ModelStatus:
        """Unload a version; without one, the whole model."""
        return _model(self._call(self._stub.UnloadModel, repository_pb2.UnloadModelRequest(), model=model, version=version))

    def reload(self, model: str) -> ModelStatus:
        """Reconcile the model with its folder now, and retry refused versions."""
        return _model(self._call(self._stub.ReloadModel, repository_pb2.ReloadModelRequest(), model=model))

    def rollback(self, model: str, version: str = "") -> ModelStatus:
        """Route all requests that name no version to this one; without one, to the version before."""
        return _model(self._call(self._stub.RollbackModel, repository_pb2.RollbackModelRequest(), model=model, version=version))

    def set_label(self, model: str, label: str, version: str = "") -> ModelStatus:
        """Set a label to a version; without one, to none."""
        request = repository_pb2.SetLabelRequest()
        return _model(self._call(self._stub.SetLabel, request, model=model, label=label, version=version))

    def put_glossary(self, model: str, name: str, content: bytes, format: str = "tsv") -> ModelStatus:
        """Write a glossary into the model's folder, as the content of a file of a format: tsv or tbx."""
        request = repository_pb2.PutGlossaryRequest(content=content)
        return _model(self._call(self._stub.PutGlossary, request, model=model, name=name, format=format))

    def delete_glossary(self, model: str, name: str) -> ModelStatus:
        """Remove a glossary from the model's folder."""
        return _model(self._call(self._stub.DeleteGlossary, repository_pb2.DeleteGlossaryRequest(), model=model, name=name))

    def _call(self, method: Any, request: Any, **values: str) -> Any:
        return self._calls.call(method, fill(request, values))


def _listed(response: repository_pb2.ListRepositoryResponse) -> tuple[list[ModelStatus], str]:
    return [_model(model) for model in response.models], response.problem


def _model(message: repository_pb2.RepositoryModel) -> ModelStatus:
    asked = message.requested
    return ModelStatus(
        message.name,
        message.is_ready,
        tuple(map(_version, message.versions)),
        tuple(message.problems),
        Requested(asked.is_unloaded, tuple(asked.loaded), tuple(asked.unloaded), asked.pinned, dict(asked.labels)),
        tuple(message.glossaries),
    )


def _version(message: repository_pb2.RepositoryVersion) -> VersionStatus:
    states = repository_pb2.VersionState
    state = states.Name(message.state) if message.state in states.values() else states.Name(0)
    values = {field.name: getattr(message, field.name) for field in fields(VersionStatus)}
    values |= {"state": state.removeprefix(_PREFIX).lower(), "labels": tuple(message.labels)}
    return VersionStatus(**values)
