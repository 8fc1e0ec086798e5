"""`model.toml`: version policy and settings of one model; names of versions and labels.

An invalid file is rejected as a whole: at server start this is fatal, later the previous file stays in use.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from msgspec import Struct
from pydantic import (
    AfterValidator,
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

from dragoman.export.fields import one_line, shown
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
    parse_toml,
)
from dragoman.server.service.requests import MAX_PRIORITY

MAX_CHARACTERS = 64
_RUNS = re.compile(r"[0-9]+|[^0-9]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_version_name(text: str) -> bool:
    """Return whether a version or a label can have this name."""
    return len(text) <= MAX_CHARACTERS and _NAME.fullmatch(text) is not None


def check_version_name(text: str) -> str:
    """Return a name of a version or a label; raise `ValueError` if it is invalid."""
    if not is_version_name(text):
        rule = f"letters, digits, '.', '_' and '-', at most {MAX_CHARACTERS} of them, and begin with a letter or a digit"
        raise ValueError(f"{shown(text)} is no name of a version or a label: it must be {rule}")
    return text


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a sort key that compares digit runs as numbers, before other text: 1, 2, 10; v1.2.9, v1.2.10."""
    runs = tuple((0, int(run), "") if run[0] in "0123456789" else (1, 0, run) for run in _RUNS.findall(name))
    return runs, name


VersionName = Annotated[
    str,
    AfterValidator(check_version_name),
    WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$", "maxLength": MAX_CHARACTERS}),
]

MODEL_FILE = "model.toml"
USUAL_LATEST = 1
# Settings of the server that engines do not have.
NOT_OF_ENGINES = frozenset({"keep_loaded"})

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Sticky = Literal["request", "caller"]
# Tolerance for binary rounding of decimal fractions that sum to 1.
_ROUNDING = 1e-9


class Traits(Struct, frozen=True, array_like=True):
    """Properties of a model without a server setting of the same name."""

    max_priority: int | None = None  # highest priority of its requests; None for any
    is_ready_needed: bool | None = None  # whether the server's readiness requires the model; None for the rule of `ready_when`
    one_sentence: bool | None = None  # whether the model translates one sentence at a time; None for the bundle's value
    split: str = ""  # how its texts are divided unless requests say it, see `SPLITS`; empty for not at all
    glossary: str = ""  # glossary of requests without one; empty for none
    glossaries: str = ""  # folder of its glossaries, which need not exist


NO_TRAITS = Traits()

KeepLoaded = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0),
    WithJsonSchema({"type": "string", "pattern": f"^({ALWAYS}|{DURATION.pattern})$"}),
]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Versions(_Table):
    """Policy of the served versions."""

    latest: Count | None = None  # number of the newest versions; None where `only` is set
    only: Annotated[tuple[VersionName, ...], Field(strict=False)] | None = None  # exactly these versions; None for the newest
    default: VersionName | None = None  # version or label for requests without a version; None for the newest without a weight
    sticky: Sticky = "request"  # property that selects among shares: the request id, or the caller where callers are known

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
        """Number of the newest versions that are served, where `only` is not set."""
        return USUAL_LATEST if self.latest is None else self.latest


class ModelSettings(_Table):
    """Settings of one model; None for the server's setting of that name, see `ServerConfig`, and for the rest `Traits`."""

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
    split: Literal["none", "sentences", "lines"] | None = None
    glossary: VersionName | None = None
    keep_loaded: KeepLoaded | None = None  # idle time in seconds after which the model is unloaded, infinite for never

    @property
    def traits(self) -> Traits:
        """Settings that only models have."""
        return Traits(self.max_priority, self.is_ready_needed, self.one_sentence, self.split or "", self.glossary or "")

    def within(self, config: ServerConfig) -> ServerConfig:
        """Return the settings of the model's engines on top of the server's; raise `ConfigError` if they are inconsistent."""
        own = ServerConfig.model_fields.keys() - NOT_OF_ENGINES
        return config.changed({name: value for name, value in self if value is not None and name in own})


class Swap(_Table):
    """Rollout of a version."""

    # `replace` starts the new version beside the old one; `restart` ends the old one first, to save memory.
    mode: Literal["replace", "restart"] = "replace"
    probation_seconds: Seconds = 60.0  # length of the canary check, during which a rollback is possible; 0 for none
    max_error_rate: Share = 0.05  # maximum fraction of its requests that end with a server fault in that time
    # Bound on its mean latency in that time, relative to the old version's.
    max_latency_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 3.0


class ModelFile(_Table):
    """The whole file; without arguments, the defaults for a model without a file."""

    versions: Versions = Versions()
    labels: dict[VersionName, VersionName] = {}  # version by label
    # Fraction of the requests without a version, by version or label; the default gets the rest.
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
    """Read a `model.toml`; raise `ConfigError` if it is invalid: a line for each reason, with the file and the field."""
    try:
        content = read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    fields = parse_toml(path, content)
    try:
        return ModelFile.model_validate(fields)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(detail)}" for detail in error.errors())) from None


def _explain(detail: ErrorDetails) -> str:
    # For invalid keys of a free table pydantic appends `[key]` to the location.
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
    try:
        return one_line(repr(value), 80)
    except ValueError:  # Python prints no integers of thousands of digits, which TOML can have in hexadecimal
        return "a number of too many digits"


def _names_beside(parts: list[str]) -> set[str]:
    """Return the known names in the table of an unknown one."""
    tables: Mapping[str, Any] = {name: field.annotation for name, field in ModelFile.model_fields.items()}
    return set(tables[parts[0]].model_fields) if len(parts) > 1 else set(tables)
