"""Descriptions of a server's models: plain, frozen data, and its conversion from messages."""

from dataclasses import dataclass, fields
from typing import Any

from dragoman.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Language:
    """A language that a model reads or writes.

    Attributes:
        code: As the model calls it, for example `deu_Latn`.
        names: Other spellings that mean it, lower case, with `_` between their parts, for example `de`.
    """

    code: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Defaults:
    """A model's defaults for what a request does not set; None where it has none, and the value that `Search` names applies.

    The fields are those of `Search`, and:

    Attributes:
        max_new_tokens: Tokens to generate at the most.
        is_end_forced: Whether an answer that reaches `max_new_tokens` has end-of-sequence as the last of them.
    """

    num_beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    max_new_tokens: int | None = None
    no_repeat_ngram_size: int | None = None
    suppressed_tokens: tuple[int, ...] = ()
    is_end_forced: bool = False
    special_tokens_in_text: bool | None = None


NO_DEFAULTS = Defaults()


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A version of a model that requests can get.

    Attributes:
        name: Name of its folder; where folders have no names for versions, the version that its content gives.
        version: Version that its content gives.
        labels: By which requests may name it too.
        share: Of the requests that name no version, how many get this one; 0 to 1.
        is_default: Whether it is the one that the model's policy prefers.
    """

    name: str
    version: str
    labels: tuple[str, ...] = ()
    share: float = 0.0
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model of the server; token limits include end-of-sequence.

    Attributes:
        name: As requests give it.
        version: Version of its bundle.
        is_ready: Whether it answers now.
        precision: Number format of the weights, for example `fp32`.
        device: Device that it runs on, for example `cpu`.
        max_source_tokens: Longest source.
        max_target_tokens: Longest answer.
        default_max_new_tokens: `max_new_tokens` where a request does not say.
        max_slots: Sequences decoded at once.
        source_vocab_size: Tokens a source can hold.
        target_vocab_size: Tokens an answer can hold.
        domain: Kind of text it is trained on, in a few words; empty where its card does not say.
        max_message_bytes: Largest message that the server takes or sends; 0 where it does not say.
        max_slots_per_request: Of `max_slots`, that one request may take: its beams or answers; 0 where the server does not say.
        source_languages: Languages it reads, by code; empty where it has no choice of them.
        target_languages: Languages it writes, by code; empty as above.
        default_source_language: Code of the source's language where a request does not say; empty where it has to.
        default_target_language: Code of the answer's language where a request does not say; empty where it has to.
        defaults: Defaults for what a request does not set.
        shortlist_tokens: Tokens that its answers are chosen from; 0 for its whole vocabulary.
        weight_bits: Bits of the weights of an `int8` model, 7 or 8; 0 for any other, and where the server does not say.
        cache_precision: Number format of what it keeps of every sequence while it decodes; empty where the server does not say.
        versions: All versions that requests can get, this one among them; empty where the server does not say.
        architecture: `transformer` or `rnn`, which have an encoder and a decoder, or `decoder`, a language model, whose answers go
            on with the text of a request; empty where the server does not say.
        num_engines: Engines that run it; 0 where the server does not say.
        num_threads: Compute threads of each; likewise.
        num_lone_threads: Threads of a step while no other engine of the machine computes; likewise.
    """

    name: str
    version: str
    is_ready: bool
    precision: str
    device: str
    max_source_tokens: int
    max_target_tokens: int
    default_max_new_tokens: int
    max_slots: int
    source_vocab_size: int
    target_vocab_size: int
    domain: str = ""
    max_message_bytes: int = 0
    max_slots_per_request: int = 0
    source_languages: tuple[Language, ...] = ()
    target_languages: tuple[Language, ...] = ()
    default_source_language: str = ""
    default_target_language: str = ""
    defaults: Defaults = NO_DEFAULTS
    shortlist_tokens: int = 0
    weight_bits: int = 0
    cache_precision: str = ""
    versions: tuple[ModelVersion, ...] = ()
    architecture: str = ""
    num_engines: int = 0
    num_threads: int = 0
    num_lone_threads: int = 0


def model_from_proto(message: generation_pb2.Model) -> ModelInfo:
    """Convert the description of a model."""
    values = {field.name: getattr(message, field.name) for field in fields(ModelInfo)}
    for name in ("source_languages", "target_languages"):
        values[name] = tuple(Language(language.code, tuple(language.names)) for language in values[name])
    values["versions"] = tuple(_version_from_proto(version) for version in message.versions)
    return ModelInfo(**values | {"defaults": _defaults_from_proto(message.defaults)})


def _version_from_proto(message: generation_pb2.ModelVersion) -> ModelVersion:
    return ModelVersion(message.name, message.version, tuple(message.labels), message.share, message.is_default)


def _defaults_from_proto(message: generation_pb2.Defaults) -> Defaults:
    told = {field.name: value for field, value in message.ListFields()}
    values: dict[str, Any] = {field.name: told[field.name] for field in fields(Defaults) if field.name in told}
    return Defaults(**values | {"suppressed_tokens": tuple(message.suppressed_tokens)})
