"""`model.toml`: what is wanted of one model's versions, and what differs for it from the server's settings.

A file that cannot be used is refused as a whole: at the start that ends the start, later what was read before stays in use
(`layout.scan` sees to that).
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from msgspec import Struct
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from dragoman.export.fields import one_line
from dragoman.model.files import read_bounded
from dragoman.server.config import (
    ALWAYS,
    DURATION,
    GONE,
    MAX_FILE_BYTES,
    ConfigError,
    Count,
    CountOrUsual,
    Device,
    Gibibytes,
    Replicas,
    Seconds,
    ServerConfig,
    hint,
    parse_duration,
)
from dragoman.server.models.version_names import VersionName
from dragoman.server.service.requests import MAX_PRIORITY

MODEL_FILE = "model.toml"
USUAL_LATEST = 1
# What the server has a setting for as well, and engines do not.
NOT_OF_ENGINES = frozenset({"keep_loaded"})

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Sticky = Literal["request", "caller"]
# Decimal fractions that are 1 together may be a little more in binary.
_ROUNDING = 1e-9


class Traits(Struct, frozen=True, array_like=True):
    """Properties of a model that no setting of the server is.

    Attributes:
        max_priority: Highest priority of its requests; None for any.
        is_ready_needed: Whether the server is ready only while it is; None for the rule of `ready_when`.
        one_sentence: Whether it knows one sentence at a time; None for the bundle's answer.
    """

    max_priority: int | None = None
    is_ready_needed: bool | None = None
    one_sentence: bool | None = None


NO_TRAITS = Traits()

KeepLoaded = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0),
    WithJsonSchema({"type": "string", "pattern": f"^({ALWAYS}|{DURATION.pattern})$"}),
]


class _Table(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Versions(_Table):
    """Which versions are served.

    Attributes:
        latest: So many of the newest; None where `only` says it.
        only: These and no others; None for the newest.
        default: Version or label that answers requests which name none; None for the newest that has no share of its own.
        sticky: What of a request decides which share it is in: its id, or its caller where callers are known.
    """

    latest: Count | None = None
    only: Annotated[tuple[VersionName, ...], Field(strict=False)] | None = None
    default: VersionName | None = None
    sticky: Sticky = "request"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.latest is not None and self.only is not None:
            raise ValueError("latest and only are both set")
        if self.only == ():
            raise ValueError("only names no version")
        if self.only is not None and len(set(self.only)) < len(self.only):
            raise ValueError("only has a version twice")
        return self

    @property
    def num_latest(self) -> int:
        """How many of the newest versions are served, where `only` is not set."""
        return USUAL_LATEST if self.latest is None else self.latest


class ModelSettings(_Table):
    """What a model has of its own; what is None is the server's setting of that name, where there is one.

    Those that the server has as well are described there, in `ServerConfig`.

    Attributes:
        max_priority: Highest priority that a request for it may have; None for any.
        one_sentence: Whether it knows one sentence at a time; None for what the bundle says.
        is_ready_needed: Whether it counts for the server's readiness; None for what `ready_when` says.
        keep_loaded: Seconds without a request after which it may be unloaded, infinite for never; None where nothing is said.
    """

    num_threads: CountOrUsual | None = None
    replicas: Replicas | None = None
    device: Device | None = None
    gpu_memory_gib: Gibibytes | None = None
    max_slots: Count | None = None
    max_slots_per_request: CountOrUsual | None = None
    max_waiting_requests: Count | None = None
    max_waiting_tokens: Count | None = None
    max_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    is_ready_needed: bool | None = None
    one_sentence: bool | None = None
    keep_loaded: KeepLoaded | None = None

    @property
    def traits(self) -> Traits:
        """Those of them that no setting of the server is."""
        return Traits(self.max_priority, self.is_ready_needed, self.one_sentence)

    def within(self, config: ServerConfig) -> ServerConfig:
        """Return the settings that the model's engines are started with.

        Args:
            config: The server's.

        Raises:
            ConfigError: If these do not fit together with the server's.
        """
        own = ServerConfig.model_fields.keys() - NOT_OF_ENGINES
        return config.changed({name: value for name, value in self if value is not None and name in own})


class Swap(_Table):
    """How a version takes another's place.

    Attributes:
        mode: `replace` starts the new one beside the old one; `restart` ends the old one first, where both do not fit in memory.
        probation_seconds: How long the new one is watched while the old one can come back; 0 for not at all.
        max_error_rate: Share of its requests that may fail through the server's fault in that time.
        max_latency_factor: So many times as long as with the old one its requests may take in that time.
    """

    mode: Literal["replace", "restart"] = "replace"
    probation_seconds: Seconds = 60.0
    max_error_rate: Share = 0.05
    max_latency_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 3.0


class ModelFile(_Table):
    """The whole file; without arguments, what holds for a model that has none.

    Attributes:
        versions: Which are served.
        labels: Version by label.
        weights: Share of the requests that name no version, by version or label; the default gets the rest.
        settings: That differ from the server's.
        swap: How versions change.
    """

    versions: Versions = Versions()
    labels: dict[VersionName, VersionName] = {}
    weights: dict[VersionName, Share] = {}
    settings: ModelSettings = ModelSettings()
    swap: Swap = Swap()

    @field_validator("weights")
    @classmethod
    def _check_sum(cls, weights: dict[str, float]) -> dict[str, float]:
        if (total := math.fsum(weights.values())) > 1 + _ROUNDING:
            raise ValueError(f"are {total:g} together, more than 1")
        return weights


def read_model_file(path: Path) -> ModelFile:
    """Read a `model.toml`.

    Raises:
        ConfigError: If it cannot be read or used: a line for each reason, which names the file and the field.
    """
    try:
        fields = tomllib.loads(read_bounded(path, MAX_FILE_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
        raise ConfigError(f"{path}: not a TOML file: {reason}") from error
    try:
        return ModelFile.model_validate(fields)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(detail)}" for detail in error.errors())) from None


def _explain(detail: ErrorDetails) -> str:
    """Return one line about one wrong field."""
    # In a table of one's own names pydantic says `[key]` of the name itself.
    parts = [str(part) for part in detail["loc"] if part != "[key]"]
    field = one_line(".".join(parts), 120)
    match detail["type"]:
        case "extra_forbidden":
            if parts[-1] in GONE:
                return f"{field}: is gone: {GONE[parts[-1]]}"
            return f"{field}: unknown field{hint(parts[-1], _names_beside(parts))}"
        case "value_error":
            return one_line(f"{field}: {detail['ctx']['error']}")
        case "tuple_type":
            reason = "must be a list of names in quotes"
        case "model_type" | "dict_type":
            reason = "must be a table"
        case _:
            reason = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{field}: {_written(detail['input'])}: {reason}"


def _written(value: object) -> str:
    """Return a value of the file as a message has it."""
    try:
        return one_line(repr(value), 80)
    except ValueError:  # Python writes no number of thousands of digits, which TOML can have in hexadecimal
        return "a number of too many digits"


def _names_beside(parts: list[str]) -> set[str]:
    """Return the names that there are where an unknown one was found."""
    tables: Mapping[str, Any] = {name: field.annotation for name, field in ModelFile.model_fields.items()}
    return set(tables[parts[0]].model_fields) if len(parts) > 1 else set(tables)
