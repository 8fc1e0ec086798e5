"""What operators are told of models: the messages of `dragoman.v1.Repository`."""

from collections.abc import Iterable

from dragoman.export.fields import tellable
from dragoman.server.core.administration import ModelStatus, VersionStatus
from dragoman.v1 import repository_pb2


def to_listing(models: Iterable[ModelStatus], problem: str) -> repository_pb2.ListRepositoryResponse:
    """Return the message that tells how models are, and why their folder could not be looked at."""
    return repository_pb2.ListRepositoryResponse(models=[to_model(model) for model in models], problem=tellable(problem))


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
