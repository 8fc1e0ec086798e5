"""Descriptions of models and versions as dragoman.v1 messages."""

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import structs

from dragoman.export.fields import tellable
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.registry import ModelRegistry
from dragoman.server.protocols.v1.messages import check_size
from dragoman.server.service.administration import ModelStatus, Order, Verb, VersionStatus
from dragoman.server.service.answers import shortlist_tokens
from dragoman.server.service.languages import PromptTemplates
from dragoman.server.service.requests import default_max_new_tokens
from dragoman.v1 import generation_pb2, repository_pb2

# Operators' changes of a model, by RPC.
CHANGES: Mapping[str, Verb] = {
    "LoadModel": "load",
    "UnloadModel": "unload",
    "ReloadModel": "reload",
    "RollbackModel": "rollback",
    "SetLabel": "label",
    "PutGlossary": "put_glossary",
    "DeleteGlossary": "delete_glossary",
}


class Descriptions:
    """Describes models as `Model` messages; languages, possibly hundreds per model, are cached."""

    def __init__(self, models: ModelRegistry, max_message_bytes: int) -> None:
        self._models = models
        self._max_message_bytes = max_message_bytes
        self._languages: WeakKeyDictionary[PromptTemplates, generation_pb2.Model] = WeakKeyDictionary()

    def of(self, model: LoadedModel) -> generation_pb2.Model:
        """Return a model's description; raise `InvalidRequest` if it exceeds `max_message_bytes`."""
        described = self._described(model)
        check_size(described, self._max_message_bytes, "")
        return described

    def of_all(self, models: Iterable[LoadedModel]) -> generation_pb2.ListModelsResponse:
        """Return the models' descriptions; raise `InvalidRequest` if they exceed `max_message_bytes`."""
        described = generation_pb2.ListModelsResponse(models=[self._described(model) for model in models])
        check_size(described, self._max_message_bytes, "Ask for the models one by one")
        return described

    def _described(self, model: LoadedModel) -> generation_pb2.Model:
        manifest = model.manifest
        described = generation_pb2.Model()
        described.CopyFrom(self._with_languages(model.templates))
        described.MergeFrom(
            generation_pb2.Model(
                name=model.name,
                version=model.version,
                is_ready=model.engine.is_ready,
                precision=manifest.precision,
                device=model.device,
                max_source_tokens=manifest.max_source_tokens,
                max_target_tokens=manifest.max_target_tokens,
                default_max_new_tokens=default_max_new_tokens(manifest),
                max_slots=model.max_slots,
                source_vocab_size=manifest.source_vocab_size,
                target_vocab_size=manifest.target_vocab_size,
                domain=manifest.domain,
                max_message_bytes=self._max_message_bytes,
                max_slots_per_request=model.max_slots_per_request,
                defaults=generation_pb2.Defaults(**structs.asdict(manifest.defaults)),
                shortlist_tokens=shortlist_tokens(manifest),
                weight_bits=manifest.weight_bits if manifest.precision == "int8" else 0,
                cache_precision=manifest.cache_precision,
                architecture=manifest.architecture,
                num_engines=model.num_engines,
                num_threads=model.num_threads,
                num_lone_threads=model.num_lone_threads,
                versions=[generation_pb2.ModelVersion(**one._asdict()) for one in self._models.served(model.name)],
            )
        )
        return described

    def _with_languages(self, templates: PromptTemplates) -> generation_pb2.Model:
        """Return a description with a model's languages only, to be copied."""
        written = self._languages.get(templates)
        if written is None:
            written = self._languages[templates] = generation_pb2.Model(
                source_languages=[generation_pb2.Language(code=x.code, names=x.names) for x in templates.source_languages],
                target_languages=[generation_pb2.Language(code=x.code, names=x.names) for x in templates.target_languages],
                default_source_language=templates.default_source_language,
                default_target_language=templates.default_target_language,
            )
        return written


def to_order(verb: Verb, request: Any, model: str) -> Order:
    """Return the order of a request to change a model."""
    glossary = {"glossary": request.name} if hasattr(request, "name") else {}
    content = {"content": request.content, "format": request.format} if hasattr(request, "content") else {}
    return Order(verb, model, getattr(request, "version", ""), getattr(request, "label", ""), **glossary, **content)


def to_listing(models: Iterable[ModelStatus], problem: str) -> repository_pb2.ListRepositoryResponse:
    """Return the message of models' statuses and their folder's problem."""
    return repository_pb2.ListRepositoryResponse(models=[to_model(model) for model in models], problem=tellable(problem))


def to_model(model: ModelStatus) -> repository_pb2.RepositoryModel:
    """Return the message of a model's status."""
    asked = model.requested
    return repository_pb2.RepositoryModel(
        name=tellable(model.name),
        is_ready=model.is_ready,
        versions=[_to_version(version) for version in model.versions],
        problems=map(tellable, model.problems),
        requested=repository_pb2.Requested(
            is_unloaded=asked.is_unloaded, loaded=asked.loaded, unloaded=asked.unloaded, pinned=asked.pinned, labels=asked.labels
        ),
        glossaries=model.glossaries,
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
