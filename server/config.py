"""Server settings from flags, environment, a TOML file and defaults, in this order of precedence; immutable.

`max_slots` in the file is `DRAGOMAN_MAX_SLOTS` in the environment and `--max-slots` on the command line. An unknown or impossible
setting stops the start. docs/settings.md and the chart's schema are generated from the fields below (`make chart`).
"""

import difflib
import ipaddress
import itertools
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    DirectoryPath,
    Field,
    FilePath,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from dragoman.export.fields import one_line
from dragoman.model.errors import InputError

PREFIX = "DRAGOMAN_"
CONFIG_FILE_VARIABLE = "DRAGOMAN_CONFIG"
# Variables with our prefix that are not settings: read by the client, by the tests, and by the stores of bundles.
_OTHERS = ("SERVER", "TOKEN", "ADMIN_SERVER", "ADMIN_TOKEN", "DATA", "CUDA_STUB", "STORE_TOKEN")
OTHER_VARIABLES = frozenset({CONFIG_FILE_VARIABLE, *(f"{PREFIX}{name}" for name in _OTHERS)})
# A file may be a pipe, so its size is not known before it is read.
MAX_FILE_BYTES = 1 << 16

# Removed settings, with the reason or the replacement.
GONE = {
    **dict.fromkeys(("gpu_row_buckets", "gpu_capacity_buckets"), "sizes follow from max_slots and the model's lengths"),
    **dict.fromkeys(("max_watches", "max_watches_per_connection"), "1,024 health watches, 16 of a connection, are allowed"),
    **dict.fromkeys(
        ("restart_backoff_initial_seconds", "restart_backoff_max_seconds"),
        "the pause before a restart grows from 0.1 s to 30 s",
    ),
    "engine": "an engine is always a process",
    "gpu_attention_kernels": "flash and memory-efficient attention are used, where the GPU has them",
    "gpu_graphs": "steps are captured when the engine is idle, and run without graphs where that fails",
    "gpu_steps_ahead": "steps are always begun ahead where a batch goes on unchanged",
    "handshake_seconds": "a handshake may take 10 s",
    "keepalive_timeout_seconds": "a client has 20 s to answer a ping",
    "latency_buckets": "histograms have buckets from 0.5 ms to 2 min",
    "load_wait_seconds": "a request waits 30 s for a model at most; set a shorter deadline to wait less",
    "max_ahead": "up to 16 waiting requests are encoded ahead",
    "max_batch_streams_per_connection": "64 streams of a connection are allowed",
    "min_ping_interval_seconds": "a client may ping every 10 s",
    "models_folder": "set XDG_CACHE_HOME, below which models of a store are kept",
    "prefill_tokens_per_step": "512 source tokens are encoded between two steps",
    "reflection": "reflection is always on, for callers of auth_tokens_file where that is set",
    "store_cache_gib": "20 GiB of what came from a store are kept",
    "store_poll_seconds": "a store is polled every 30 s, or with models_poll_seconds = 0 only on SIGHUP",
    "warmup": "a model is always warmed up before it is ready",
}

# Wildcard addresses.
ANY_ADDRESS = ("0.0.0.0", "::")

Port = Annotated[int, Field(ge=0, le=65535)]
# Libraries and messages have 32-bit integers.
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrUsual = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# gRPC counts milliseconds in 32 bits.
MAX_CONNECTION_SECONDS = 2_147_483
ConnectionSeconds = Annotated[float, Field(ge=0, le=MAX_CONNECTION_SECONDS)]
Gibibytes = Annotated[float, Field(ge=0, le=2**20, allow_inf_nan=False)]
Replicas = Annotated[int, Field(ge=0, le=256)]
Names = Annotated[tuple[str, ...], NoDecode]

ALWAYS = "always"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION = re.compile(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)({'|'.join(_UNITS)})")

_DEVICE = r"auto|cpu|cuda(:[0-9]{1,3})?"


class ConfigError(InputError):
    """A setting that is unknown, missing or impossible."""


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # any other name may resolve to any address
        return False


def parse_duration(text: object) -> float:
    """Return a duration such as `90s`, `10m` or `1.5h`, or `always`, in seconds; raise `ValueError` for anything else."""
    if text == ALWAYS:
        return math.inf
    if not isinstance(text, str) or (found := DURATION.fullmatch(text)) is None:
        raise ValueError(f"{text!r:.80} is not a time such as 90s, 10m or 1.5h, in quotes")
    return float(found[1]) * _UNITS[found[2]]


def _host(settings: dict[str, Any]) -> str:
    return cast(str, settings["host"])


def _check_device(device: str) -> str:
    if re.fullmatch(_DEVICE, device) is None:
        raise ValueError(f"{device!r} is not auto, cpu, cuda or cuda:N")
    return device


def _path_or_address(value: object) -> object:
    return Path(value) if isinstance(value, str) and "://" not in value else value


Device = Annotated[str, AfterValidator(_check_device), WithJsonSchema({"type": "string", "pattern": f"^({_DEVICE})$"})]

ALL, ANY = "all", "any"


@dataclass(frozen=True, slots=True)
class ReadyRule:
    """The setting `ready_when`: `word` is `all` or `any`, or empty if `names` are given."""

    word: str = ANY
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> "ReadyRule":
        """Return the rule of a setting: a word, or comma-separated names; raise `ValueError` for anything else."""
        names = frozenset(name for part in text.split(",") if (name := part.strip()))
        if names in ({ALL}, {ANY}):
            return cls("".join(names))
        if not names or names & {ALL, ANY}:
            raise ValueError(f"{text!r} is not {ALL}, {ANY}, or names of models with commas between them")
        return cls("", names)

    def needs(self, name: str, is_ready_needed: bool | None = None) -> bool:
        """Return whether a model must have been ready once before the server is; its own `is_ready_needed` takes precedence."""
        return bool(self.word) or name in self.names if is_ready_needed is None else is_ready_needed


class ServerConfig(BaseSettings):
    """Every setting of `dragoman serve`, made by `load`; the constructor reads no source but its arguments."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    models: Annotated[Path | str, BeforeValidator(_path_or_address)] = Field(
        description="Folder of the models to serve, each in a folder of its own, or the address of such a folder in a store."
    )
    models_poll_seconds: Seconds = Field(
        2.0, description="Interval at which that folder is read for versions added or removed; 0 for only on SIGHUP."
    )
    model_files: Path | None = Field(
        None, description="Folder of files NAME.toml, each used instead of the model.toml of the model of that name."
    )
    load_timeout_seconds: PositiveSeconds = Field(
        600.0, description="Time that an engine of a version added while the server runs may take until it is ready."
    )
    require_signatures: Path | None = Field(
        None, description="PEM file, or folder of PEM files, of public keys; bundles signed with none of them are refused."
    )
    keep_loaded: str = Field(
        ALWAYS,
        description="Time without a request after which a model is unloaded, such as 10m; the next request loads it. Or always.",
    )
    models_memory_gib: Gibibytes = Field(
        0.0,
        description="Memory for all engines together; 0 for that of the container or machine. Idle models are unloaded for others.",
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address of the gRPC port; 0.0.0.0 or :: for all interfaces.")
    port: Port = Field(8500, description="The gRPC port; 0 for any free one.")
    http: bool = Field(True, description="Whether HTTP is served: the same requests as JSON.")
    http_host: str = Field(default_factory=_host, min_length=1, description="Address of the HTTP port; by default that of `host`.")
    http_port: Port = Field(8080, description="The HTTP port; 0 for any free one.")
    console: bool = Field(True, description="Whether / of the HTTP port is a page that shows models and engines.")
    http_allowed_hosts: Names = Field(
        (),
        description="Host names that HTTP requests may have, beside addresses and localhost, such as mt.example.org; none for any.",
    )
    http_allowed_origins: Names = Field(
        (), description="Origins whose pages may send requests (CORS), such as https://example.org; * for any, none for none."
    )
    metrics_host: str = Field(
        default_factory=_host, min_length=1, description="Address of /metrics, /healthz and /readyz; by default that of `host`."
    )
    metrics_port: Port = Field(8501, description="The port of metrics and probes; 0 for any free one.")
    metrics_token_file: FilePath | None = Field(
        None, description="File of bearer tokens for /metrics and /readyz?verbose, one a line; probes need none."
    )
    metrics_tls_certificate: FilePath | None = Field(
        None, description="PEM file with the metrics port's certificate chain; turns HTTPS on there."
    )
    metrics_tls_key: FilePath | None = Field(None, description="PEM file with its private key, not encrypted.")

    admin_port: Port | None = Field(
        None,
        description="Port of the admin service, which loads, unloads and rolls back models; 0 for any free one, unset for none.",
    )
    admin_host: str = Field(
        "127.0.0.1", min_length=1, description="Address of the admin port; any but a loopback address needs admin_tokens_file."
    )
    admin_tokens_file: FilePath | None = Field(
        None, description="Operators, their tokens and models, in the format of auth_tokens_file; unset to allow every caller."
    )
    http_admin: bool = Field(
        False, description="Whether the admin service is served over HTTP, too, to operators of admin_tokens_file."
    )

    front_ends: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Frontend processes that share the ports; more than one where the engines are faster than one frontend."
    )
    replicas: Replicas = Field(
        0, description="Engines of each model on the CPU; 0 for as many as are measured to be fastest, and 1 if num_threads is set."
    )
    num_threads: CountOrUsual = Field(0, description="Compute threads of each engine; 0 for as many as are measured to be fastest.")
    pin_engines: bool = Field(
        False, description="Whether each engine is bound to cores of its own; for machines that serve nothing else."
    )
    device: Device = Field(
        "auto", description="Device of models: auto (CUDA where the machine has it and the bundle is for it), cpu, cuda or cuda:N."
    )
    gpu_memory_gib: Gibibytes = Field(
        0.0, description="CUDA memory of a model; 0 for nine tenths of what is free when it is loaded."
    )
    weights_cache: str = Field(
        "auto",
        min_length=1,
        description="Folder through which a model's engines share its weights on the CPU; auto for the temporary folder, or off.",
    )
    max_slots: Count = Field(64, description="Sequences that an engine decodes at once.")
    max_slots_per_request: CountOrUsual = Field(
        0, description="Slots of one request, for its beams or answers; 0 for a quarter of max_slots, but at least 16."
    )
    max_waiting_requests: Count = Field(1024, description="Requests that may wait for a model; more are refused.")
    max_waiting_tokens: Count = Field(65536, description="Source tokens of waiting requests of a model; more are refused.")

    max_text_characters: Count = Field(
        100_000, description="Characters of a text, or of all texts of a call, that are divided into sentences or lines."
    )

    glossaries_folder: DirectoryPath | None = Field(
        None,
        description="Folder of the glossaries that callers make, shared by frontends and servers; unset to lose them at the end.",
    )

    result_cache_mib: CountOrUsual = Field(64, description="MiB of answers that a frontend keeps for equal requests; 0 for none.")
    result_cache_shared: bool = Field(
        False, description="Whether callers get answers that were computed for others; the time tells them that these asked."
    )

    batch_folder: Path | None = Field(
        None, description="Folder of OpenAI's files and batches, which all frontends and later servers share; unset for none."
    )
    batch_folder_gib: Annotated[float, Field(gt=0, le=2**20)] = Field(
        16.0, description="GiB of files in batch_folder, a quarter of them for a caller; more are refused."
    )

    ready_when: str = Field(
        "any", description="Models that must be ready for the server to be: any (at the start each of them once), all, or names."
    )
    drain_seconds: Seconds = Field(30.0, description="Time that running requests have to finish after SIGTERM.")
    watchdog_seconds: Annotated[float, Field(ge=2, allow_inf_nan=False)] = Field(
        30.0, description="Silence after which an engine is restarted; it reports every second, also when idle."
    )

    max_message_bytes: Annotated[int, Field(ge=1024, le=MAX_COUNT)] = Field(
        4 * 2**20, description="Largest message in either direction, and largest HTTP body; larger ones are refused unread."
    )
    max_connection_age_seconds: ConnectionSeconds = Field(
        0.0, description="Age at which clients are asked to reconnect, so that load spreads over new replicas; 0 for never."
    )
    max_connection_age_grace_seconds: ConnectionSeconds = Field(
        0.0, description="Time that calls have after that until their connection is closed; 0 for no limit."
    )
    max_connection_idle_seconds: ConnectionSeconds = Field(
        300.0, description="Time after which a connection without calls is closed; 0 for never."
    )
    max_connections: CountOrUsual = Field(
        4096, description="Open connections to each address of a frontend; more are closed at once; 0 for no limit."
    )
    max_concurrent_streams: Count = Field(
        2048, description="Calls in flight on one connection; the client's library keeps further ones back."
    )
    max_messages_per_second: Seconds = Field(
        5000.0, description="Rate at which messages of one connection are read; more wait; 0 for no limit."
    )
    keepalive_seconds: Annotated[float, Field(ge=0.001, le=MAX_CONNECTION_SECONDS)] = Field(
        40.0, description="Silence of a connection after which the server pings the client."
    )

    tls_certificate: FilePath | None = Field(None, description="PEM file with the server's certificate chain; turns TLS on.")
    tls_key: FilePath | None = Field(None, description="PEM file with its private key, not encrypted.")
    tls_client_ca: FilePath | None = Field(
        None, description="PEM file with the authorities of client certificates; clients without one are refused."
    )
    auth_tokens_file: FilePath | None = Field(
        None,
        description="Callers, their tokens and limits: TOML, or `name:token` or `token` a line; every call but health needs one.",
    )
    default_deadline_seconds: Seconds = Field(0.0, description="Deadline of requests whose caller sets none; 0 for none.")
    max_deadline_seconds: Seconds = Field(0.0, description="Longest deadline of any request; 0 for no limit.")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="One JSON object a line, or text; auto is text on a terminal and JSON elsewhere."
    )
    tracing_endpoint: str = Field(
        "", description="OpenTelemetry collector of spans (OTLP over gRPC): http://HOST:PORT or https://HOST:PORT."
    )
    tracing_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests that are traced, where the caller's traceparent does not decide."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Disable pydantic's sources: `load` reads them, to know each value's origin."""
        return (init_settings,)

    @field_validator("http_allowed_hosts", "http_allowed_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("http_allowed_hosts")
    @classmethod
    def _check_hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", name) is None:
                raise ValueError(f"{name!r} is no name of a host, in lower case and without a port")
        return names

    @field_validator("http_allowed_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", origin) is None:
                raise ValueError(f"{origin!r} is not SCHEME://HOST or SCHEME://HOST:PORT, in lower case and without a path, nor *")
        return origins

    @field_validator("keep_loaded")
    @classmethod
    def _check_keep_loaded(cls, text: str) -> str:
        if parse_duration(text) <= 0:
            raise ValueError(f"{text!r} is no time at all")
        return text

    @field_validator("ready_when")
    @classmethod
    def _check_ready_when(cls, text: str) -> str:
        ReadyRule.parse(text)
        return text

    @field_validator("tracing_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        if endpoint and re.fullmatch(r"https?://[^/\s@]+:\d{1,5}/?", endpoint) is None:
            raise ValueError(f"{endpoint!r} is not http://HOST:PORT or https://HOST:PORT")
        return endpoint

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for contradiction in self._contradictions():
            raise ValueError(contradiction)
        return self

    def _contradictions(self) -> Iterator[str]:
        for certificate, key in (("tls_certificate", "tls_key"), ("metrics_tls_certificate", "metrics_tls_key")):
            given = [name for name in (certificate, key) if getattr(self, name) is not None]
            if len(given) == 1:
                yield f"{given[0]} is set without {key if given == [certificate] else certificate}"
        if self.tls_client_ca is not None and self.tls_certificate is None:
            yield "tls_client_ca is set without tls_certificate and tls_key"
        if 0 < self.max_deadline_seconds < self.default_deadline_seconds:
            default, longest = self.default_deadline_seconds, self.max_deadline_seconds
            yield f"default_deadline_seconds ({default:g}) is more than max_deadline_seconds ({longest:g})"
        if self.pin_engines and not self.num_threads:
            yield "pin_engines is set without num_threads, which says how many cores an engine gets"
        if self.replicas > 1 and self.device.startswith("cuda"):
            yield f"replicas are for the CPU, and device is {self.device}: one engine fills a GPU"
        if self.front_ends > 1 and sys.platform != "linux":
            yield "front_ends: only Linux divides a port's connections among processes"
        if self.max_slots_per_request > self.max_slots:
            yield f"max_slots_per_request ({self.max_slots_per_request}) is more than max_slots ({self.max_slots})"
        if self.http_admin and not (self.http and self.admin_tokens_file):
            yield "http_admin is set without http, or without admin_tokens_file, which says who may administer"
        if self.admin_port is not None and self.admin_tokens_file is None and not is_loopback(self.admin_host):
            yield f"admin_host is {self.admin_host}, which others may reach, and admin_tokens_file is not set"
        yield from self._port_collisions()

    def _port_collisions(self) -> Iterator[str]:
        ports = [("port", self.host, self.port), ("metrics_port", self.metrics_host, self.metrics_port)]
        ports += [("http_port", self.http_host, self.http_port)] if self.http else []
        ports += [("admin_port", self.admin_host, self.admin_port)] if self.admin_port else []
        for (name, host, port), (other, other_host, other_port) in itertools.combinations(ports, 2):
            is_same_host = host == other_host or host in ANY_ADDRESS or other_host in ANY_ADDRESS
            # A name may resolve to several addresses, one of which is free.
            is_same_host |= "localhost" in (host, other_host) and is_loopback(host) and is_loopback(other_host)
            if port == other_port != 0 and is_same_host:
                yield f"{name} and {other} are both {port}"

    @property
    def gpu_memory_bytes(self) -> int:
        """`gpu_memory_gib` in bytes; rounded up, so that anything above 0 is a limit."""
        return math.ceil(self.gpu_memory_gib * 2**30)

    @property
    def models_memory_bytes(self) -> int:
        """`models_memory_gib` in bytes; rounded up, so that anything above 0 is a limit."""
        return math.ceil(self.models_memory_gib * 2**30)

    @property
    def keep_loaded_seconds(self) -> float:
        """`keep_loaded` in seconds; infinite for `always`."""
        return parse_duration(self.keep_loaded)

    @property
    def ready_rule(self) -> ReadyRule:
        """`ready_when`, parsed."""
        return ReadyRule.parse(self.ready_when)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other, valid values, such as a model's own; raise `ConfigError` if they contradict each other."""
        changed = self.model_copy(update=dict(changes))
        for contradiction in changed._contradictions():
            raise ConfigError(contradiction)
        return changed


def load(overrides: Mapping[str, Any], config_file: Path | None = None) -> ServerConfig:
    """Read the settings; flags precede the environment, then the file, then the defaults.

    `overrides` are flags by setting name, None if not given; the file is by default the one that DRAGOMAN_CONFIG names, if any.

    Raises:
        ConfigError: Naming every wrong setting and its origin.
    """
    if config_file is None and (named := os.environ.get(CONFIG_FILE_VARIABLE)):
        config_file = Path(named)
    flags = {name: value for name, value in overrides.items() if value is not None}
    variables = _read_environment()
    settings = _read_file(config_file) if config_file is not None else {}
    origins = (
        {name: str(config_file) for name in settings}
        | {name: f"environment, {PREFIX}{name.upper()}" for name in variables}
        | {name: f"flag --{name.replace('_', '-')}" for name in flags}
    )
    try:
        return ServerConfig(**{**settings, **variables, **flags})
    except ValidationError as error:
        details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
        raise ConfigError("\n".join(_explain(detail, origins) for detail in details)) from None


def _read_environment() -> dict[str, Any]:
    """Return the settings in the environment, by name; raise `ConfigError` naming unknown variables with our prefix."""
    known = {f"{PREFIX}{name.upper()}" for name in ServerConfig.model_fields}
    ours = sorted(name for name in os.environ if name.upper().startswith(PREFIX))
    unknown = [name for name in ours if name.upper() not in known | OTHER_VARIABLES]
    unknown = [name for name in unknown if os.environ[name] or name[len(PREFIX) :].lower() not in GONE]
    links = [name for name in ours if os.environ[name].startswith("tcp://")]
    if links:
        # Kubernetes describes a Service called `dragoman` to every pod near it with variables like DRAGOMAN_PORT=tcp://10.0.0.1:8500.
        raise ConfigError(
            f"{links[0]}: looks like a Kubernetes service link, not a setting; set enableServiceLinks: false in the pod's"
            " specification (environment)"
        )
    if unknown:
        raise ConfigError("\n".join(f"{name}: {_unknown(name.upper(), known)} (environment)" for name in unknown))
    return EnvSettingsSource(ServerConfig)()


def _read_file(path: Path) -> dict[str, Any]:
    """Return the settings of a file; raise `ConfigError` if it is unreadable or invalid."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    return parse_toml(path, content)


def parse_toml(path: Path, content: bytes) -> dict[str, Any]:
    """Return the content of a TOML file; raise `ConfigError`, of one line, if it is invalid."""
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
        raise ConfigError(f"{path}: not a TOML file: {reason}") from error


def _explain(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Return one line about a wrong setting, or about contradicting ones."""
    if not detail["loc"]:
        return str(detail["ctx"]["error"])
    name = str(detail["loc"][0])
    origin = f" ({origins[name]})" if name in origins else ""
    match detail["type"]:
        case "missing":
            return f"{name}: not set; give --{name}, {PREFIX}{name.upper()} or a line in the configuration file"
        case "extra_forbidden":
            return f"{name}: {_unknown(name, set(ServerConfig.model_fields))}{origin}"
        case "value_error":
            return f"{name}: {detail['ctx']['error']}{origin}"
        case _:
            return f"{name}: {detail['input']!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}{origin}"


def _unknown(name: str, known: set[str]) -> str:
    setting = name.removeprefix(PREFIX).lower()
    return f"is gone: {GONE[setting]}" if setting in GONE else f"unknown setting{hint(name, known)}"


def hint(name: str, known: set[str]) -> str:
    """Return a suggestion to append to an unknown name, or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
