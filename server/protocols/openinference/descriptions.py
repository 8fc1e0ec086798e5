"""Metadata, configuration, statistics and index of models, as messages of the Open Inference Protocol and Triton's extensions."""

from collections.abc import Iterator
from typing import Any

from dragoman.extras import own_version
from dragoman.inference import inference_pb2
from dragoman.server.errors import InvalidRequest, NotReady
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.registry import ModelRegistry
from dragoman.server.protocols.openinference.requests import MAX_TEXTS, NAMED, OUTPUTS, SAMPLING_PARAMETERS, TEXT_INPUT, Field
from dragoman.server.service.callers import Caller
from dragoman.server.service.generate import Generation

PLATFORM, BACKEND = "dragoman_onnx", "dragoman"
# Triton's names of the supported extensions.
EXTENSIONS = ("model_configuration", "statistics", "parameters")
ANY = -1
FIELDS = (Field(TEXT_INPUT, "text", "BYTES"), Field(SAMPLING_PARAMETERS, "text", "BYTES"), *NAMED.values())
READY, UNAVAILABLE = "READY", "UNAVAILABLE"


def server_metadata() -> inference_pb2.ServerMetadataResponse:
    """Return the server's metadata."""
    return inference_pb2.ServerMetadataResponse(name="dragoman", version=own_version(), extensions=EXTENSIONS)


class Descriptions:
    """Describes models to callers that `generation` allows to use them."""

    def __init__(self, models: ModelRegistry, generation: Generation) -> None:
        self._models = models
        self._generation = generation

    def metadata(self, name: str, version: str, caller: Caller | None) -> inference_pb2.ModelMetadataResponse:
        """Return a model's inputs and outputs; raise `UnknownModel` if there is none."""
        model = self._generation.model(name, caller, version)
        metadata = inference_pb2.ModelMetadataResponse
        return metadata(
            name=model.name,
            versions=[served.name for served in self._models.served(model.name)],
            platform=PLATFORM,
            inputs=[metadata.TensorMetadata(name=x.name, datatype=x.datatype, shape=[ANY, *_dims(x)]) for x in FIELDS],
            outputs=[
                metadata.TensorMetadata(name=x.name, datatype=x.datatype, shape=[ANY, ANY if x.subject == "answer" else 1])
                for x in OUTPUTS.values()
            ],
        )

    def config(self, name: str, version: str, caller: Caller | None) -> inference_pb2.ModelConfigResponse:
        """Return a model's configuration in Triton's format."""
        model = self._generation.model(name, caller, version)
        config = inference_pb2.ModelConfig(
            name=model.name,
            platform=PLATFORM,
            backend=BACKEND,
            max_batch_size=MAX_TEXTS,
            input=[
                inference_pb2.ModelInput(
                    name=x.name, data_type=_config_type(x.datatype), dims=_dims(x), optional=x.name != TEXT_INPUT
                )
                for x in FIELDS
            ],
            output=[
                inference_pb2.ModelOutput(
                    name=x.name, data_type=_config_type(x.datatype), dims=[ANY if x.subject == "answer" else 1]
                )
                for x in OUTPUTS.values()
            ],
            model_transaction_policy=inference_pb2.ModelTransactionPolicy(decoupled=True),
        )
        return inference_pb2.ModelConfigResponse(config=config)

    def statistics(self, name: str, version: str, caller: Caller | None) -> inference_pb2.ModelStatisticsResponse:
        """Return this process's statistics of a model or, for an empty name, of all models."""
        if name:
            model = self._generation.model(name, caller, version)
            wanted = [(model.version, model)] if version else self._versions(model.name)
        else:
            wanted = [pair for model in self._generation.models(caller) for pair in self._versions(model.name)]
        return inference_pb2.ModelStatisticsResponse(model_stats=[_statistics(model, called) for called, model in wanted])

    def index(self, request: inference_pb2.RepositoryIndexRequest, caller: Caller | None) -> inference_pb2.RepositoryIndexResponse:
        """Return all versions of the models that a caller may use; raise `InvalidRequest` for any repository name."""
        if request.repository_name:
            raise InvalidRequest("repository_name", "there is one, which has no name")
        entry = inference_pb2.RepositoryIndexResponse.ModelIndex
        found = [
            entry(name=model.name, version=called, state=READY if model.engine.is_ready else UNAVAILABLE)
            for each in self._generation.models(caller)
            for called, model in self._versions(each.name)
        ]
        return inference_pb2.RepositoryIndexResponse(models=[x for x in found if x.state == READY or not request.ready])

    def _versions(self, name: str) -> Iterator[tuple[str, LoadedModel]]:
        """Yield the name and model of each served version."""
        for served in self._models.served(name):
            try:
                yield served.name, self._models.get(name, served.name)
            except NotReady:
                continue


def _dims(field: Field) -> list[int]:
    """Return a tensor's shape per text; tokens are shared by all texts."""
    return [ANY if field.kind == "tokens" else 1]


def _config_type(datatype: str) -> Any:
    """Return a datatype's value in `ModelConfig`."""
    return getattr(inference_pb2.DataType, f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}")


def _statistics(model: LoadedModel, called: str) -> inference_pb2.ModelStatistics:
    outcomes = model.outcomes
    success, queue = (round(seconds * 1e9) for seconds in (outcomes.seconds, min(outcomes.queue_seconds, outcomes.seconds)))
    duration, count = inference_pb2.StatisticDuration, outcomes.num_answered
    return inference_pb2.ModelStatistics(
        name=model.name,
        version=called,
        inference_count=count,
        inference_stats=inference_pb2.InferStatistics(
            success=duration(count=count, ns=success),
            fail=duration(count=outcomes.num_failed),
            queue=duration(count=count, ns=queue),
            compute_infer=duration(count=count, ns=success - queue),
        ),
    )
