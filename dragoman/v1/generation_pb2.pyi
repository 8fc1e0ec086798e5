from google.protobuf import any_pb2 as _any_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "max_new_tokens", "truncate", "request_id", "priority", "num_beams", "num_return_sequences", "length_penalty", "early_stopping", "do_sample", "temperature", "top_k", "top_p", "seed", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "suppressed_tokens", "forced_prefix", "return_alternatives", "return_log_probs", "top_log_probs", "source_language", "target_language", "model_version", "special_tokens_in_text", "split", "no_cache", "markup", "keep_placeholders", "translate_attributes", "terms", "glossary")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETURN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_PREFIX_FIELD_NUMBER: _ClassVar[int]
    RETURN_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_IN_TEXT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_FIELD_NUMBER: _ClassVar[int]
    MARKUP_FIELD_NUMBER: _ClassVar[int]
    KEEP_PLACEHOLDERS_FIELD_NUMBER: _ClassVar[int]
    TRANSLATE_ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    GLOSSARY_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    max_new_tokens: int
    truncate: bool
    request_id: str
    priority: int
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_new_tokens: int
    repetition_penalty: float
    no_repeat_ngram_size: int
    suppressed_tokens: _containers.RepeatedScalarFieldContainer[int]
    forced_prefix: str
    return_alternatives: bool
    return_log_probs: bool
    top_log_probs: int
    source_language: str
    target_language: str
    model_version: str
    special_tokens_in_text: bool
    split: str
    no_cache: bool
    markup: str
    keep_placeholders: bool
    translate_attributes: bool
    terms: _containers.RepeatedCompositeFieldContainer[Term]
    glossary: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., max_new_tokens: _Optional[int] = ..., truncate: _Optional[bool] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., num_beams: _Optional[int] = ..., num_return_sequences: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ..., do_sample: _Optional[bool] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., no_repeat_ngram_size: _Optional[int] = ..., suppressed_tokens: _Optional[_Iterable[int]] = ..., forced_prefix: _Optional[str] = ..., return_alternatives: _Optional[bool] = ..., return_log_probs: _Optional[bool] = ..., top_log_probs: _Optional[int] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., model_version: _Optional[str] = ..., special_tokens_in_text: _Optional[bool] = ..., split: _Optional[str] = ..., no_cache: _Optional[bool] = ..., markup: _Optional[str] = ..., keep_placeholders: _Optional[bool] = ..., translate_attributes: _Optional[bool] = ..., terms: _Optional[_Iterable[_Union[Term, _Mapping]]] = ..., glossary: _Optional[str] = ...) -> None: ...

class Term(_message.Message):
    __slots__ = ("source", "targets", "case_sensitive")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    CASE_SENSITIVE_FIELD_NUMBER: _ClassVar[int]
    source: str
    targets: _containers.RepeatedScalarFieldContainer[str]
    case_sensitive: bool
    def __init__(self, source: _Optional[str] = ..., targets: _Optional[_Iterable[str]] = ..., case_sensitive: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "model", "model_version", "text", "tokens", "finish_reason", "is_truncated", "usage", "timings", "answers", "seed", "shortlist_tokens", "warnings", "segments")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    IS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHORTLIST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    model_version: str
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    is_truncated: bool
    usage: Usage
    timings: Timings
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    seed: int
    shortlist_tokens: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., model_version: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., is_truncated: _Optional[bool] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., seed: _Optional[int] = ..., shortlist_tokens: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("source_start", "source_end", "target_start", "target_end", "score", "is_cut")
    SOURCE_START_FIELD_NUMBER: _ClassVar[int]
    SOURCE_END_FIELD_NUMBER: _ClassVar[int]
    TARGET_START_FIELD_NUMBER: _ClassVar[int]
    TARGET_END_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    source_start: int
    source_end: int
    target_start: int
    target_end: int
    score: float
    is_cut: bool
    def __init__(self, source_start: _Optional[int] = ..., source_end: _Optional[int] = ..., target_start: _Optional[int] = ..., target_end: _Optional[int] = ..., score: _Optional[float] = ..., is_cut: _Optional[bool] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("text", "tokens", "finish_reason", "score", "log_probs", "unmet_terms")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    UNMET_TERMS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    score: float
    log_probs: _containers.RepeatedCompositeFieldContainer[TokenLogProb]
    unmet_terms: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., score: _Optional[float] = ..., log_probs: _Optional[_Iterable[_Union[TokenLogProb, _Mapping]]] = ..., unmet_terms: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenLogProb(_message.Message):
    __slots__ = ("token", "piece", "log_prob", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: int
    piece: bytes
    log_prob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogProb]
    def __init__(self, token: _Optional[int] = ..., piece: _Optional[bytes] = ..., log_prob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogProb, _Mapping]]] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("text", "tokens", "result")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    result: GenerateResponse
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., result: _Optional[_Union[GenerateResponse, _Mapping]] = ...) -> None: ...

class GenerateBatchResponse(_message.Message):
    __slots__ = ("request_id", "response", "error", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    response: GenerateResponse
    error: Error
    index: int
    def __init__(self, request_id: _Optional[str] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class GenerateBulkRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ...) -> None: ...

class GenerateBulkResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[GenerateBatchResponse]
    def __init__(self, answers: _Optional[_Iterable[_Union[GenerateBatchResponse, _Mapping]]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "details", "retry_after_seconds")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    retry_after_seconds: float
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "text", "target", "request_id", "priority", "length_penalty", "return_alignment", "return_word_alignment", "alignment_layer", "source_language", "target_language", "model_version", "special_tokens_in_text")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    RETURN_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    RETURN_WORD_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_LAYER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_IN_TEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    target: str
    request_id: str
    priority: int
    length_penalty: float
    return_alignment: bool
    return_word_alignment: bool
    alignment_layer: int
    source_language: str
    target_language: str
    model_version: str
    special_tokens_in_text: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., target: _Optional[str] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., length_penalty: _Optional[float] = ..., return_alignment: _Optional[bool] = ..., return_word_alignment: _Optional[bool] = ..., alignment_layer: _Optional[int] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., model_version: _Optional[str] = ..., special_tokens_in_text: _Optional[bool] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("request_id", "model", "model_version", "log_prob", "score", "tokens", "alignment", "word_alignment", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    WORD_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    model_version: str
    log_prob: float
    score: float
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogProb]
    alignment: Alignment
    word_alignment: str
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., model_version: _Optional[str] = ..., log_prob: _Optional[float] = ..., score: _Optional[float] = ..., tokens: _Optional[_Iterable[_Union[TokenLogProb, _Mapping]]] = ..., alignment: _Optional[_Union[Alignment, _Mapping]] = ..., word_alignment: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Alignment(_message.Message):
    __slots__ = ("num_source_tokens", "num_target_tokens", "weights", "source_pieces")
    NUM_SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PIECES_FIELD_NUMBER: _ClassVar[int]
    num_source_tokens: int
    num_target_tokens: int
    weights: _containers.RepeatedScalarFieldContainer[float]
    source_pieces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, num_source_tokens: _Optional[int] = ..., num_target_tokens: _Optional[int] = ..., weights: _Optional[_Iterable[float]] = ..., source_pieces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("source_tokens", "generated_tokens")
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source_tokens: int
    generated_tokens: int
    def __init__(self, source_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "decode_seconds", "time_to_first_token_seconds", "total_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., time_to_first_token_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model", "model_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "version", "is_ready", "precision", "device", "max_source_tokens", "max_target_tokens", "default_max_new_tokens", "max_slots", "source_vocab_size", "target_vocab_size", "domain", "max_message_bytes", "max_slots_per_request", "source_languages", "target_languages", "defaults", "shortlist_tokens", "default_source_language", "default_target_language", "weight_bits", "cache_precision", "versions", "architecture", "num_engines", "num_threads", "num_lone_threads")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGES_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGES_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    SHORTLIST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BITS_FIELD_NUMBER: _ClassVar[int]
    CACHE_PRECISION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    NUM_LONE_THREADS_FIELD_NUMBER: _ClassVar[int]
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
    domain: str
    max_message_bytes: int
    max_slots_per_request: int
    source_languages: _containers.RepeatedCompositeFieldContainer[Language]
    target_languages: _containers.RepeatedCompositeFieldContainer[Language]
    defaults: Defaults
    shortlist_tokens: int
    default_source_language: str
    default_target_language: str
    weight_bits: int
    cache_precision: str
    versions: _containers.RepeatedCompositeFieldContainer[ModelVersion]
    architecture: str
    num_engines: int
    num_threads: int
    num_lone_threads: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., is_ready: _Optional[bool] = ..., precision: _Optional[str] = ..., device: _Optional[str] = ..., max_source_tokens: _Optional[int] = ..., max_target_tokens: _Optional[int] = ..., default_max_new_tokens: _Optional[int] = ..., max_slots: _Optional[int] = ..., source_vocab_size: _Optional[int] = ..., target_vocab_size: _Optional[int] = ..., domain: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., max_slots_per_request: _Optional[int] = ..., source_languages: _Optional[_Iterable[_Union[Language, _Mapping]]] = ..., target_languages: _Optional[_Iterable[_Union[Language, _Mapping]]] = ..., defaults: _Optional[_Union[Defaults, _Mapping]] = ..., shortlist_tokens: _Optional[int] = ..., default_source_language: _Optional[str] = ..., default_target_language: _Optional[str] = ..., weight_bits: _Optional[int] = ..., cache_precision: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[ModelVersion, _Mapping]]] = ..., architecture: _Optional[str] = ..., num_engines: _Optional[int] = ..., num_threads: _Optional[int] = ..., num_lone_threads: _Optional[int] = ...) -> None: ...

class ModelVersion(_message.Message):
    __slots__ = ("name", "version", "labels", "share", "is_default")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    share: float
    is_default: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., share: _Optional[float] = ..., is_default: _Optional[bool] = ...) -> None: ...

class Language(_message.Message):
    __slots__ = ("code", "names")
    CODE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    code: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, code: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class Defaults(_message.Message):
    __slots__ = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "min_new_tokens", "max_new_tokens", "no_repeat_ngram_size", "suppressed_tokens", "is_end_forced", "special_tokens_in_text")
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETURN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    DO_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_END_FORCED_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_IN_TEXT_FIELD_NUMBER: _ClassVar[int]
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    min_new_tokens: int
    max_new_tokens: int
    no_repeat_ngram_size: int
    suppressed_tokens: _containers.RepeatedScalarFieldContainer[int]
    is_end_forced: bool
    special_tokens_in_text: bool
    def __init__(self, num_beams: _Optional[int] = ..., num_return_sequences: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ..., do_sample: _Optional[bool] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_new_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., no_repeat_ngram_size: _Optional[int] = ..., suppressed_tokens: _Optional[_Iterable[int]] = ..., is_end_forced: _Optional[bool] = ..., special_tokens_in_text: _Optional[bool] = ...) -> None: ...
