"""The dragoman.v1.Repository service: its messages in and out; what operators ask for is done elsewhere.

Errors are raised as `server.errors` and become statuses in the interceptor.
"""

from collections.abc import Sequence

from dragoman.export.fields import tellable
from dragoman.server.core.administration import Administration, ModelStatus, Operator, VersionStatus
from dragoman.server.faces.grpc.interceptors import Context, current_call
from dragoman.v1 import repository_pb2, repository_pb2_grpc


class RepositoryServicer(repository_pb2_grpc.RepositoryServicer):
    """Serves every RPC of the service. Method names are the protocol's."""

    def __init__(self, administration: Administration) -> None:
        """Serve what it does."""
        self._administration = administration

    async def ListRepository(
        self, request: repository_pb2.ListRepositoryRequest, context: Context
    ) -> repository_pb2.ListRepositoryResponse:
        """Tell how models are."""
        return self._listed(self._administration.list(_operator(context), request.model))

    async def RefreshRepository(
        self, _: repository_pb2.RefreshRepositoryRequest, context: Context
    ) -> repository_pb2.ListRepositoryResponse:
        """Look at all folders."""
        return self._listed(await self._administration.refresh(_operator(context)))

    async def LoadModel(self, request: repository_pb2.LoadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Serve a version, or what the policy asks for."""
        return to_model(await self._administration.load(_operator(context), request.model, request.version))

    async def UnloadModel(self, request: repository_pb2.UnloadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Serve a version, or the model, no more."""
        return to_model(await self._administration.unload(_operator(context), request.model, request.version))

    async def ReloadModel(self, request: repository_pb2.ReloadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Look at a model's folder."""
        return to_model(await self._administration.reload(_operator(context), request.model))

    async def RollbackModel(self, request: repository_pb2.RollbackModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Have an earlier version answer."""
        return to_model(await self._administration.rollback(_operator(context), request.model, request.version))

    async def SetLabel(self, request: repository_pb2.SetLabelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Have a label stand for a version."""
        operator = _operator(context)
        return to_model(await self._administration.set_label(operator, request.model, request.label, request.version))

    def _listed(self, models: Sequence[ModelStatus]) -> repository_pb2.ListRepositoryResponse:
        return repository_pb2.ListRepositoryResponse(
            models=[to_model(model) for model in models], problem=tellable(self._administration.problem)
        )


def to_model(model: ModelStatus) -> repository_pb2.RepositoryModel:
    """Return the message that tells how a model is."""
    asked = model.requested
    return repository_pb2.RepositoryModel(
        name=tellable(model.name),
        is_ready=model.is_ready,
        versions=[_to_version(version) for version in model.versions],
        problems=map(tellable, model.problems),
        requested=repository_pb2.Requested(
            is_unloaded=asked.is_unloaded, loaded=asked.loaded, unloaded=asked.unloaded, pinned=asked.pinned, labels=asked.labels
        ),
    )


def _to_version(version: VersionStatus) -> repository_pb2.RepositoryVersion:
    return repository_pb2.RepositoryVersion(
        name=version.name,
        version=version.version,
        state=f"VERSION_STATE_{version.state.upper()}",
        since=version.since,
        cause=version.cause,
        reason=tellable(version.reason),
        labels=version.labels,
        share=version.share,
        is_default=version.is_default,
        num_answered=version.num_answered,
        num_failed=version.num_failed,
    )


def _operator(context: Context) -> Operator:
    """Return who asks: by name where tokens say so, else by address."""
    caller = current_call.get().caller
    return Operator(context.peer()) if caller is None else Operator(caller.name, caller.models)
