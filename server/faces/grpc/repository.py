"""The dragoman.v1.Repository service: its messages in and out; what operators ask for is done elsewhere.

Errors are raised as `server.errors` and become statuses in the interceptor.
"""

from collections.abc import Sequence

from dragoman.server.core.administration import Administration, ModelStatus, Operator
from dragoman.server.faces.grpc.interceptors import Context, current_call
from dragoman.server.faces.v1.repository import to_listing, to_model
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
        return self._listed(self._administration.list(operator_of(context), request.model))

    async def RefreshRepository(
        self, _: repository_pb2.RefreshRepositoryRequest, context: Context
    ) -> repository_pb2.ListRepositoryResponse:
        """Look at all folders."""
        return self._listed(await self._administration.refresh(operator_of(context)))

    async def LoadModel(self, request: repository_pb2.LoadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Serve a version, or what the policy asks for."""
        return to_model(await self._administration.load(operator_of(context), request.model, request.version))

    async def UnloadModel(self, request: repository_pb2.UnloadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Serve a version, or the model, no more."""
        return to_model(await self._administration.unload(operator_of(context), request.model, request.version))

    async def ReloadModel(self, request: repository_pb2.ReloadModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Look at a model's folder."""
        return to_model(await self._administration.reload(operator_of(context), request.model))

    async def RollbackModel(self, request: repository_pb2.RollbackModelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Have an earlier version answer."""
        return to_model(await self._administration.rollback(operator_of(context), request.model, request.version))

    async def SetLabel(self, request: repository_pb2.SetLabelRequest, context: Context) -> repository_pb2.RepositoryModel:
        """Have a label stand for a version."""
        operator = operator_of(context)
        return to_model(await self._administration.set_label(operator, request.model, request.label, request.version))

    def _listed(self, models: Sequence[ModelStatus]) -> repository_pb2.ListRepositoryResponse:
        return to_listing(models, self._administration.problem)


def operator_of(context: Context) -> Operator:
    """Return who asks: by name where tokens say so, else by address."""
    caller = current_call.get().caller
    return Operator(context.peer()) if caller is None else Operator(caller.name, caller.models)
