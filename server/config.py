"""The server's settings: read once from flags, environment, a TOML file and defaults, in that order, then never changed.

A setting is called the same everywhere: `max_slots` in the file is `DRAGOMAN_MAX_SLOTS` in the environment and `--max-slots` on the
command line. An unknown or impossible setting stops the start and is named together with where it came from.
"""

import difflib
import ipaddress
import itertools
import math
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
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

from dragoman.export.attention_kernels import USUAL, kernel_bits
from dragoman.model.errors import InputError
from dragoman.server.durations import ALWAYS, parse_keeping
from dragoman.server.service.readiness import ReadyRule

PREFIX = "DRAGOMAN_"
CONFIG_FILE_VARIABLE = "DRAGOMAN_CONFIG"
# Variables with our prefix that are not settings: the configuration file, what the client reads, where tests find the corpus and
# the libraries of the stub device, what web servers are shown that bundles come from.
_OTHERS = ("SERVER", "TOKEN", "ADMIN_SERVER", "ADMIN_TOKEN", "DATA", "CUDA_STUB", "STORE_TOKEN")
OTHER_VARIABLES = frozenset({CONFIG_FILE_VARIABLE, *(f"{PREFIX}{name}" for name in _OTHERS)})
# A pipe is as good as a file, so the size is not asked for beforehand.
MAX_FILE_BYTES = 1 << 16
# fmt: off
LATENCY_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
)
# fmt: on

# Addresses that stand for all that the machine has.
ANY_ADDRESS = ("0.0.0.0", "::")

Port = Annotated[int, Field(ge=0, le=65535)]
# What every library and every message can hold.
MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# What gRPC counts in 32-bit milliseconds.
ConnectionSeconds = Annotated[float, Field(ge=0, le=2_147_483)]
PositiveConnectionSeconds = Annotated[float, Field(ge=0.001, le=2_147_483)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ConfigError(InputError):
    """A setting that is unknown, missing or impossible."""


_DEVICE = r"auto|cpu|cuda(:[0-9]{1,3})?"


def _host(settings: dict[str, Any]) -> str:
    return cast(str, settings["host"])


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is one that only this machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, of which nobody knows what it will mean
        return False


def _check_device(device: str) -> str:
    if re.fullmatch(_DEVICE, device) is None:
        raise ValueError(f"{device!r} is not auto, cpu, cuda or cuda:N")
    return device


def _path_or_address(value: object) -> object:
    """Return an address as it is, and anything else for what a path is made of."""
    return value if isinstance(value, str) and "://" in value else Path(value) if isinstance(value, str) else value


# Of the settings that a model may have of its own.
Device = Annotated[str, AfterValidator(_check_device), WithJsonSchema({"type": "string", "pattern": f"^({_DEVICE})$"})]
Gibibytes = Annotated[float, Field(ge=0, le=2**20, allow_inf_nan=False)]
CountOrUsual = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Replicas = Annotated[int, Field(ge=0, le=256)]


class ServerConfig(BaseSettings):
    """Every setting of `dragoman serve`. Use `load`, which reads the sources; the constructor takes its arguments only."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    models: Annotated[Path | str, BeforeValidator(_path_or_address)] = Field(
        description="Folder of the models to serve, each in a folder of its own; or the address of such a folder in a store."
    )
    models_folder: Path | None = Field(
        None, description="Folder that follows what is at an address; by default one of its own among the user's caches."
    )
    store_poll_seconds: Seconds = Field(30.0, description="Pause between two looks at that address; 0 to look only on SIGHUP.")
    store_cache_gib: Annotated[float, Field(ge=0.001, le=2**20, allow_inf_nan=False)] = Field(
        20.0, description="How much of what came from there is kept on disk, in that folder."
    )
    models_poll_seconds: Seconds = Field(
        2.0,
        description="Pause between two looks at that folder, for versions that have come or gone; 0 to look only on SIGHUP.",
    )
    model_files: Path | None = Field(
        None, description="Folder of files NAME.toml, each in the place of the model.toml of the model of that name."
    )
    load_timeout_seconds: PositiveSeconds = Field(
        600.0, description="How long the engine of a version that comes while the server runs may take until it is ready."
    )

    require_signatures: Path | None = Field(
        None, description="PEM file, or folder of PEM files, of public keys; bundles that none of them signed are refused."
    )
    keep_loaded: str = Field(
        ALWAYS,
        description="How long a model stays loaded without a request, such as 10m; then the next request loads it. Or always.",
    )
    load_wait_seconds: PositiveSeconds = Field(
        30.0, description="How long a request waits for a model that is being loaded, at the most; then UNAVAILABLE."
    )
    models_memory_gib: Gibibytes = Field(
        0.0,
        description="Memory that all engines together may take; 0 for what the container or machine has. Idle models give way.",
    )

    host: str = Field(
        "127.0.0.1", min_length=1, description="Address of every port that has none of its own; 0.0.0.0 or :: for all interfaces."
    )
    port: Port = Field(8500, description="Its port; 0 for any free one.")
    http: bool = Field(True, description="Answer HTTP too: the same requests as JSON.")
    http_host: str = Field(default_factory=_host, min_length=1, description="Address of the HTTP port; by default that of `host`.")
    http_port: Port = Field(8080, description="Its port; 0 for any free one.")
    console: bool = Field(True, description="Show a page to look at, at / of the HTTP port, and tell it what engines do.")
    http_allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Names that HTTP may be asked by, beside addresses and localhost, such as mt.example.org; none for any."
    )
    http_allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Origins whose pages may use it in a browser, such as https://example.org; * for any, none for none."
    )
    metrics_host: str = Field(
        default_factory=_host, min_length=1, description="Address of /metrics, /healthz and /readyz; by default that of `host`."
    )
    metrics_port: Port = Field(8501, description="Its port; 0 for any free one.")
    metrics_token_file: FilePath | None = Field(
        None, description="Bearer tokens for /metrics and /readyz?verbose, one a line; probes need none."
    )
    metrics_tls_certificate: FilePath | None = Field(
        None, description="PEM file with the metrics port's certificate chain; turns HTTPS on there."
    )
    metrics_tls_key: FilePath | None = Field(None, description="PEM file with its private key, not encrypted.")

    admin_port: Port | None = Field(
        None,
        description="Port of the admin service, which loads, unloads and rolls back; 0 for any free one, unset for none.",
    )
    admin_host: str = Field(
        "127.0.0.1", min_length=1, description="Its address; any but this machine's own needs admin_tokens_file."
    )
    admin_tokens_file: FilePath | None = Field(
        None, description="Who may use it, and which models: as auth_tokens_file; unset for everybody who reaches it."
    )
    http_admin: bool = Field(False, description="Let those of admin_tokens_file do the same over HTTP, on its port.")

    front_ends: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Processes that answer callers on the port; more where engines outrun one."
    )
    engine: Literal["process", "inline"] = Field(
        "process", description="Where a model's engine runs: in a process of its own, or on a thread, for debugging."
    )
    replicas: Replicas = Field(
        0,
        description="Engines that run each model on the CPU; 0 chooses by the cores, and is one if num_threads is set.",
    )
    num_threads: CountOrUsual = Field(0, description="Threads that compute, for each engine; 0 chooses by the cores there are.")
    pin_engines: bool = Field(
        False,
        description="Keep each engine to cores of its own; for machines that serve nothing else.",
    )
    device: Device = Field(
        "auto", description="Where models run: auto (CUDA where it is there and the bundle is for it), cpu, cuda or cuda:N."
    )
    gpu_memory_gib: Gibibytes = Field(
        0.0, description="CUDA memory that a model may take; 0 for nine tenths of what is free when it is loaded."
    )
    gpu_row_buckets: Annotated[tuple[Count, ...], NoDecode] = Field(
        (), description="Batch sizes to capture CUDA graphs for, rising; none for the usual ones."
    )
    gpu_capacity_buckets: Annotated[tuple[Count, ...], NoDecode] = Field(
        (), description="Lengths that caches on CUDA are laid out for, rising; none for the usual ones."
    )
    gpu_attention_kernels: str = Field(
        USUAL,
        description="Kernels of attention on CUDA: some of flash, efficient, cudnn and math, or auto for ONNX Runtime's choice.",
    )
    gpu_graphs: Literal["idle", "start", "never"] = Field(
        "idle",
        description="When steps on CUDA are captured that longer texts need: idle or start; with never no step is.",
    )
    gpu_steps_ahead: bool = Field(True, description="Begin a step on CUDA before it is asked for, where a batch goes on unchanged.")
    weights_cache: str = Field(
        "auto",
        min_length=1,
        description="Folder by which engines of a model share its weights on the CPU; auto: one of temporary files, or off.",
    )
    max_slots: Count = Field(64, description="Sequences an engine decodes at once.")
    max_slots_per_request: CountOrUsual = Field(
        0, description="Of those, that one request may take: its beams or answers; 0 for a quarter, but at least 16."
    )
    prefill_tokens_per_step: Count = Field(
        512, description="Source tokens the encoder reads between two decode steps, at the most; of prompts, a quarter of that."
    )
    max_ahead: int = Field(
        16, ge=0, description="Waiting requests whose sources may be encoded beside others', before they have a slot; 0 for none."
    )
    max_waiting_requests: Count = Field(1024, description="Requests that may wait for a model before it refuses more.")
    max_waiting_tokens: Count = Field(65536, description="Source tokens of those, before it refuses more.")
    warmup: bool = Field(
        True, description="Run a model through its shapes before it is ready, so that the first caller is not slow."
    )

    ready_when: str = Field(
        "any",
        description="Which models must take requests for the server to be ready: any (at the start each once), all, or names.",
    )
    drain_seconds: Seconds = Field(30.0, description="How long running requests may take to finish after SIGTERM.")
    watchdog_seconds: Annotated[float, Field(ge=2, allow_inf_nan=False)] = Field(
        30.0, description="How long an engine may be silent before it is restarted; it gives a sign of life every second."
    )
    restart_backoff_initial_seconds: PositiveSeconds = Field(
        0.5, description="Pause before an engine's first restart; then doubled."
    )
    restart_backoff_max_seconds: PositiveSeconds = Field(30.0, description="Longest such pause.")

    max_message_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = Field(
        4 * 2**20, description="Largest message, both ways, and body over HTTP; a larger one is refused unread."
    )
    max_connection_age_seconds: ConnectionSeconds = Field(
        0.0, description="Ask clients to reconnect after so long, so that load spreads over new replicas; 0 for never."
    )
    max_connection_age_grace_seconds: ConnectionSeconds = Field(
        0.0, description="How long calls may go on after that before their connection is closed; 0 for as long as they take."
    )
    max_connection_idle_seconds: ConnectionSeconds = Field(
        300.0, description="How long a connection may have no call under way before it is closed; 0 for as long as it likes."
    )
    max_connections: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        4096, description="Connections at once to each address, of a front end; more are closed at once; 0 for any number."
    )
    max_concurrent_streams: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        2048, description="Calls under way on one connection; a client keeps further ones until there is room."
    )
    max_messages_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        5000.0, description="Messages that are taken up from one connection; more wait; 0 for any number."
    )
    max_watches: Count = Field(1024, description="Streams of health's `Watch` at once, of a front end.")
    max_watches_per_connection: Count = Field(16, description="Of them on one connection.")
    max_batch_streams_per_connection: Count = Field(
        64, description="Streams of `GenerateBatch`, `GenerateBulk` and `ModelStreamInfer` of a connection."
    )
    handshake_seconds: PositiveConnectionSeconds = Field(
        10.0, description="How long a new connection may take until it is one, TLS included."
    )
    keepalive_seconds: PositiveConnectionSeconds = Field(
        40.0, description="How long a connection may be silent before the client is asked whether it is still there."
    )
    keepalive_timeout_seconds: PositiveConnectionSeconds = Field(
        20.0, description="How long it may take to answer that before the connection is closed."
    )
    min_ping_interval_seconds: ConnectionSeconds = Field(
        10.0, description="Clients that ask whether the server is still there more often than this are sent away."
    )
    reflection: bool = Field(True, description="Answer gRPC reflection, so that tools can list the API.")

    tls_certificate: FilePath | None = Field(None, description="PEM file with the server's certificate chain; turns TLS on.")
    tls_key: FilePath | None = Field(None, description="PEM file with its private key, not encrypted.")
    tls_client_ca: FilePath | None = Field(None, description="PEM file with the authorities of client certificates; asks for them.")
    auth_tokens_file: FilePath | None = Field(
        None,
        description="Callers, their tokens and limits: TOML, or `name:token` or `token` a line; every call but health needs one.",
    )
    default_deadline_seconds: Seconds = Field(
        0.0, description="How long a request may take whose caller sets no deadline; 0 for any time."
    )
    max_deadline_seconds: Seconds = Field(0.0, description="Longest time that any request may take; 0 for any time.")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="One JSON object a line, or text to read; by default text on a terminal, otherwise JSON."
    )
    latency_buckets: Annotated[tuple[float, ...], NoDecode] = Field(
        LATENCY_BUCKETS, description="Upper bounds in seconds of the latency histograms, rising; commas between them in a variable."
    )

    tracing_endpoint: str = Field(
        "", description="OpenTelemetry collector that gets spans (OTLP over gRPC): http://HOST:PORT or https://HOST:PORT."
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
        """Leave the reading of sources to `load`, which knows where a value came from."""
        return (init_settings,)

    @field_validator(
        *("latency_buckets", "gpu_row_buckets", "gpu_capacity_buckets", "http_allowed_hosts", "http_allowed_origins"), mode="before"
    )
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

    @field_validator("gpu_attention_kernels")
    @classmethod
    def _check_kernels(cls, names: str) -> str:
        kernel_bits(names)
        return names

    @field_validator("keep_loaded")
    @classmethod
    def _check_keep_loaded(cls, text: str) -> str:
        if parse_keeping(text) <= 0:
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

    @field_validator("gpu_row_buckets", "gpu_capacity_buckets")
    @classmethod
    def _check_rising(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(low >= high for low, high in itertools.pairwise(sizes)):
            raise ValueError("sizes must rise")
        return sizes

    @field_validator("latency_buckets")
    @classmethod
    def _check_buckets(cls, buckets: tuple[float, ...]) -> tuple[float, ...]:
        # The comparison chain is false for not-a-number too.
        if not buckets or not all(low < high for low, high in zip((0.0, *buckets), (*buckets, float("inf")), strict=True)):
            raise ValueError("bounds must be positive, finite and rising, and there must be one")
        return buckets

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self._refuse_contradictions()
        return self

    def _refuse_contradictions(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("tls_certificate", "tls_key") if self.tls_key is None else ("tls_key", "tls_certificate")
            raise ValueError(f"{given} is set without {missing}")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca is set without tls_certificate and tls_key")
        if (self.metrics_tls_certificate is None) != (self.metrics_tls_key is None):
            names = ("metrics_tls_certificate", "metrics_tls_key")
            given, missing = names if self.metrics_tls_key is None else reversed(names)
            raise ValueError(f"{given} is set without {missing}")
        if 0 < self.max_deadline_seconds < self.default_deadline_seconds:
            raise ValueError(
                f"default_deadline_seconds ({self.default_deadline_seconds:g}) is more than"
                f" max_deadline_seconds ({self.max_deadline_seconds:g})"
            )
        if self.restart_backoff_max_seconds < self.restart_backoff_initial_seconds:
            raise ValueError(
                f"restart_backoff_max_seconds ({self.restart_backoff_max_seconds:g}) is less than"
                f" restart_backoff_initial_seconds ({self.restart_backoff_initial_seconds:g})"
            )
        if self.pin_engines and self.engine == "inline":
            raise ValueError("pin_engines is for engines in processes of their own, and engine is inline")
        if self.pin_engines and not self.num_threads:
            raise ValueError("pin_engines is set without num_threads, which says how many cores an engine gets")
        if self.replicas > 1 and self.engine == "inline":
            raise ValueError("replicas are engines in processes of their own, and engine is inline")
        if self.replicas > 1 and self.device.startswith("cuda"):
            raise ValueError(f"replicas are for the CPU, and device is {self.device}: one engine fills a GPU")
        if self.front_ends > 1 and self.engine == "inline":
            raise ValueError("front_ends are for engines in processes of their own, and engine is inline")
        if self.front_ends > 1 and sys.platform != "linux":
            raise ValueError("front_ends: only Linux divides a port's connections among processes")
        if self.max_slots_per_request > self.max_slots:
            raise ValueError(f"max_slots_per_request ({self.max_slots_per_request}) is more than max_slots ({self.max_slots})")
        if self.http_admin and not (self.http and self.admin_tokens_file):
            raise ValueError("http_admin is set without http, or without admin_tokens_file, which says who may administer")
        self._check_admin_address()
        if self.port == self.metrics_port != 0 and self.host == self.metrics_host:
            raise ValueError(f"port and metrics_port are both {self.port}")
        for name, host, port in (("port", self.host, self.port), ("metrics_port", self.metrics_host, self.metrics_port)):
            if self.http and self.http_port == port != 0 and self.http_host == host:
                raise ValueError(f"{name} and http_port are both {port}")

    def _check_admin_address(self) -> None:
        if self.admin_port is None:
            return
        if self.admin_tokens_file is None and not is_loopback(self.admin_host):
            raise ValueError(f"admin_host is {self.admin_host}, which others may reach, and admin_tokens_file is not set")
        ports = [("port", self.host, self.port), ("metrics_port", self.metrics_host, self.metrics_port)]
        ports += [("http_port", self.http_host, self.http_port)] if self.http else []
        for name, host, port in ports:
            is_same_host = host == self.admin_host or host in ANY_ADDRESS or self.admin_host in ANY_ADDRESS
            # A name may stand for several addresses, of which one would be free.
            is_same_host |= "localhost" in (host, self.admin_host) and is_loopback(host) and is_loopback(self.admin_host)
            if port == self.admin_port != 0 and is_same_host:
                raise ValueError(f"{name} and admin_port are both {port}")

    @property
    def gpu_memory_bytes(self) -> int:
        """What `gpu_memory_gib` says; anything above 0 is a limit."""
        return math.ceil(self.gpu_memory_gib * 2**30)

    @property
    def models_memory_bytes(self) -> int:
        """What `models_memory_gib` says; anything above 0 is a limit."""
        return math.ceil(self.models_memory_gib * 2**30)

    @property
    def keep_loaded_seconds(self) -> float:
        """What `keep_loaded` says; infinite for always."""
        return parse_keeping(self.keep_loaded)

    @property
    def ready_rule(self) -> ReadyRule:
        """What `ready_when` says."""
        return ReadyRule.parse(self.ready_when)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return these settings with others in their place, such as a model's own.

        Args:
            changes: By name; each is one that the setting may have.

        Raises:
            ConfigError: If they do not fit together; nothing else is checked again.
        """
        changed = self.model_copy(update=dict(changes))
        try:
            changed._refuse_contradictions()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return changed


def load(overrides: Mapping[str, Any], config_file: Path | None = None) -> ServerConfig:
    """Read the settings; flags win over the environment, the environment over the file, the file over the defaults.

    Args:
        overrides: Flags by setting name; None means the flag was not given.
        config_file: TOML file; without it, the one that DRAGOMAN_CONFIG names, if any.

    Raises:
        ConfigError: Naming every wrong setting and where it came from.
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
    """Return the settings that the environment holds, by name.

    Raises:
        ConfigError: Naming every variable with our prefix that is no setting.
    """
    known = {f"{PREFIX}{name.upper()}" for name in ServerConfig.model_fields}
    ours = sorted(name for name in os.environ if name.upper().startswith(PREFIX))
    unknown = [name for name in ours if name.upper() not in known | OTHER_VARIABLES]
    links = [name for name in ours if os.environ[name].startswith("tcp://")]
    if links:
        # Kubernetes describes a Service called `dragoman` to every pod near it with variables like DRAGOMAN_PORT=tcp://10.0.0.1:8500.
        raise ConfigError(
            f"{links[0]}: looks like a Kubernetes service link, not a setting; set enableServiceLinks: false in the pod's"
            " specification (environment)"
        )
    if unknown:
        raise ConfigError("\n".join(f"{name}: unknown setting{hint(name.upper(), known)} (environment)" for name in unknown))
    return EnvSettingsSource(ServerConfig)()


def _read_file(path: Path) -> dict[str, Any]:
    """Return what a TOML file says.

    Raises:
        ConfigError: If it cannot be read or is not TOML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes")
        return tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path}: not a TOML file: {reason}") from error


def _explain(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Return one line about one wrong setting; several settings that do not fit together are named by the text itself."""
    if not detail["loc"]:
        return str(detail["ctx"]["error"])
    name = str(detail["loc"][0])
    origin = f" ({origins[name]})" if name in origins else ""
    match detail["type"]:
        case "missing":
            return f"{name}: not set; give --{name}, {PREFIX}{name.upper()} or a line in the configuration file"
        case "extra_forbidden":
            return f"{name}: unknown setting{hint(name, set(ServerConfig.model_fields))}{origin}"
        case "value_error":
            return f"{name}: {detail['ctx']['error']}{origin}"
        case _:
            return f"{name}: {detail['input']!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}{origin}"


def hint(name: str, known: set[str]) -> str:
    """Return a guess at what was meant by a name that is not known, to be put behind it, or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
