from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_STATE_UNSPECIFIED: _ClassVar[VersionState]
    VERSION_STATE_FOUND: _ClassVar[VersionState]
    VERSION_STATE_OPENING: _ClassVar[VersionState]
    VERSION_STATE_STARTING: _ClassVar[VersionState]
    VERSION_STATE_PROVING: _ClassVar[VersionState]
    VERSION_STATE_TRIAL: _ClassVar[VersionState]
    VERSION_STATE_SERVING: _ClassVar[VersionState]
    VERSION_STATE_STANDBY: _ClassVar[VersionState]
    VERSION_STATE_RETIRING: _ClassVar[VersionState]
    VERSION_STATE_REFUSED: _ClassVar[VersionState]
    VERSION_STATE_ASLEEP: _ClassVar[VersionState]
VERSION_STATE_UNSPECIFIED: VersionState
VERSION_STATE_FOUND: VersionState
VERSION_STATE_OPENING: VersionState
VERSION_STATE_STARTING: VersionState
VERSION_STATE_PROVING: VersionState
VERSION_STATE_TRIAL: VersionState
VERSION_STATE_SERVING: VersionState
VERSION_STATE_STANDBY: VersionState
VERSION_STATE_RETIRING: VersionState
VERSION_STATE_REFUSED: VersionState
VERSION_STATE_ASLEEP: VersionState

class ListRepositoryRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class RefreshRepositoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRepositoryResponse(_message.Message):
    __slots__ = ("models", "problem")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[RepositoryModel]
    problem: str
    def __init__(self, models: _Optional[_Iterable[_Union[RepositoryModel, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ReloadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class RollbackModelRequest(_message.Message):
    __slots__ = ("model", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class SetLabelRequest(_message.Message):
    __slots__ = ("model", "label", "version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    label: str
    version: str
    def __init__(self, model: _Optional[str] = ..., label: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class PutGlossaryRequest(_message.Message):
    __slots__ = ("model", "name", "content", "format")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    name: str
    content: bytes
    format: str
    def __init__(self, model: _Optional[str] = ..., name: _Optional[str] = ..., content: _Optional[bytes] = ..., format: _Optional[str] = ...) -> None: ...

class DeleteGlossaryRequest(_message.Message):
    __slots__ = ("model", "name")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    model: str
    name: str
    def __init__(self, model: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RepositoryModel(_message.Message):
    __slots__ = ("name", "is_ready", "versions", "problems", "requested", "glossaries")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    GLOSSARIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    is_ready: bool
    versions: _containers.RepeatedCompositeFieldContainer[RepositoryVersion]
    problems: _containers.RepeatedScalarFieldContainer[str]
    requested: Requested
    glossaries: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., is_ready: _Optional[bool] = ..., versions: _Optional[_Iterable[_Union[RepositoryVersion, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ..., requested: _Optional[_Union[Requested, _Mapping]] = ..., glossaries: _Optional[_Iterable[str]] = ...) -> None: ...

class RepositoryVersion(_message.Message):
    __slots__ = ("name", "version", "state", "since", "cause", "reason", "labels", "share", "is_default", "num_answered", "num_failed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    NUM_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    state: VersionState
    since: float
    cause: str
    reason: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    share: float
    is_default: bool
    num_answered: int
    num_failed: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[VersionState, str]] = ..., since: _Optional[float] = ..., cause: _Optional[str] = ..., reason: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., share: _Optional[float] = ..., is_default: _Optional[bool] = ..., num_answered: _Optional[int] = ..., num_failed: _Optional[int] = ...) -> None: ...

class Requested(_message.Message):
    __slots__ = ("is_unloaded", "loaded", "unloaded", "pinned", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IS_UNLOADED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    is_unloaded: bool
    loaded: _containers.RepeatedScalarFieldContainer[str]
    unloaded: _containers.RepeatedScalarFieldContainer[str]
    pinned: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, is_unloaded: _Optional[bool] = ..., loaded: _Optional[_Iterable[str]] = ..., unloaded: _Optional[_Iterable[str]] = ..., pinned: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...
