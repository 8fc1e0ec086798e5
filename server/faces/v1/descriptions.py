"""What a model is described with: `Model` of `dragoman.v1`."""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from msgspec import structs

from dragoman.server.core.answers import shortlist_tokens
from dragoman.server.core.defaults import default_max_new_tokens
from dragoman.server.core.frames import Frames
from dragoman.server.core.ports import Model, Models
from dragoman.server.faces.v1.conversion import check_size
from dragoman.v1 import generation_pb2


class Descriptions:
    """Describes models; remembers of each how its languages are written, of which there may be hundreds."""

    def __init__(self, models: Models, max_message_bytes: int) -> None:
        """Start with none.

        Args:
            models: What is served.
            max_message_bytes: Largest message that is sent.
        """
        self._models = models
        self._max_message_bytes = max_message_bytes
        self._languages: WeakKeyDictionary[Frames, generation_pb2.Model] = WeakKeyDictionary()

    def of(self, model: Model) -> generation_pb2.Model:
        """Return a model's description.

        Raises:
            InvalidRequest: If it is larger than a message may be.
        """
        described = self._described(model)
        check_size(described, self._max_message_bytes, "")
        return described

    def of_all(self, models: Iterable[Model]) -> generation_pb2.ListModelsResponse:
        """Return the descriptions of some.

        Raises:
            InvalidRequest: If they are larger than a message may be.
        """
        described = generation_pb2.ListModelsResponse(models=[self._described(model) for model in models])
        check_size(described, self._max_message_bytes, "Ask for the models one by one")
        return described

    def _described(self, model: Model) -> generation_pb2.Model:
        manifest = model.manifest
        described = generation_pb2.Model()
        described.CopyFrom(self._with_languages(model.frames))
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
                shortlist_tokens=shortlist_tokens(model),
                weight_bits=manifest.weight_bits if manifest.precision == "int8" else 0,
                cache_precision=manifest.cache_precision,
                architecture=manifest.architecture,
                versions=[generation_pb2.ModelVersion(**one._asdict()) for one in self._models.served(model.name)],
            )
        )
        return described

    def _with_languages(self, frames: Frames) -> generation_pb2.Model:
        """Return what is said of a model's languages, to be copied."""
        said = self._languages.get(frames)
        if said is None:
            said = self._languages[frames] = generation_pb2.Model(
                source_languages=[generation_pb2.Language(code=x.code, names=x.names) for x in frames.source_languages],
                target_languages=[generation_pb2.Language(code=x.code, names=x.names) for x in frames.target_languages],
                default_source_language=frames.default_source_language,
                default_target_language=frames.default_target_language,
            )
        return said
