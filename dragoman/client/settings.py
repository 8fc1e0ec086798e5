"""Settings that all calls of a client share: address, channel options, credentials, time limits and retries."""

import ipaddress
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from dragoman.client.batch import MAX_BYTES, MIN_ANSWER_BYTES, Batch, Grouping
from dragoman.client.errors import CallError, FailedCall, from_rpc_error
from dragoman.client.request import DEFAULT_MAX_REQUEST_BYTES, SEND_OPTION, check_size
from dragoman.client.retry import Attempts, RetryPolicy

DEFAULT_PORT: Final = 8500
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"

ChannelOptions = Mapping[str, str | int]

_RECEIVE_OPTION = "grpc.max_receive_message_length"
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
# gRPC counts nanoseconds in signed 64 bits, so a timeout of more than 292 years would be over at once.
MAX_TIMEOUT_SECONDS = 1e9

_CHANNEL_OPTIONS: ChannelOptions = {
    # A name with several addresses is balanced over all of them, a call at a time.
    "grpc.service_config": json.dumps({"loadBalancingConfig": [{"round_robin": {}}]}),
    # A client has connections of its own: where they are shared, one that just failed elsewhere in the process fails here too.
    "grpc.use_local_subchannel_pool": 1,
    # Larger ones are refused before they are sent: see `check_size`.
    SEND_OPTION: DEFAULT_MAX_REQUEST_BYTES,
    _RECEIVE_OPTION: _MAX_ANSWER_BYTES,
    # A peer that vanished without a word is noticed well within a call's time, and the call can be tried elsewhere. No pings
    # without calls: servers take many of those for abuse.
    "grpc.keepalive_time_ms": 20_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.keepalive_permit_without_calls": 0,
    # gRPC's own wait between connections starts at 1 s and grows to 120 s; all attempts of a call would fit into one wait.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 5_000,
    # A name is looked up again when a connection ends, but by default not within 30 s: a rollout replaces every address in less.
    "grpc.dns_min_time_between_resolutions_ms": 1_000,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that all calls of a client share.

    Attributes:
        target: Server to call, as `client.target` reads it; once made, as gRPC wants it.
        timeout_seconds: Time for a call, all attempts together, where the call does not say.
        retry: When to try again.
        token: Bearer token sent with each call; None for none. Never printed.
        options: Channel options beside and before our own, by their gRPC names.
        clock: Seconds that only ever grow.
        is_secure: Whether the connection has credentials for TLS.
    """

    target: str
    timeout_seconds: float
    retry: RetryPolicy
    token: str | None = field(repr=False)
    options: ChannelOptions
    clock: Callable[[], float]
    is_secure: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", grpc_target(self.target, is_secure=self.is_secure))
        _check_timeout(self.timeout_seconds)
        if self.token is not None and not (self.token and all("!" <= character <= "~" for character in self.token)):
            raise ValueError("token: must be printable ASCII without spaces")

    def channel(self, library: Any, credentials: grpc.ChannelCredentials | None) -> Any:
        """Open a channel of `grpc` or `grpc.aio`."""
        if credentials is None:
            return library.insecure_channel(self.target, self.channel_options())
        return library.secure_channel(self.target, credentials, self.channel_options())

    def channel_options(self) -> list[tuple[str, str | int]]:
        """Return the options for the channel; the caller's win over ours."""
        return list({**_CHANNEL_OPTIONS, **self.options}.items())

    @property
    def max_request_bytes(self) -> float:
        """Largest request that is sent."""
        value = int({**_CHANNEL_OPTIONS, **self.options}[SEND_OPTION])
        return math.inf if value < 0 else value

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call that is made here and now: it names the active span."""
        credentials = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        return credentials + trace_metadata()

    def error(self, failure: FailedCall, request_id: str = "") -> CallError:
        """Turn a failed call into the error of its status, which names the server where it could not be reached."""
        return from_rpc_error(failure, request_id, self.target)

    def attempts(self, request: Message, timeout_seconds: float | None) -> Attempts:
        """Start the clock for one call, None for the client's time; raises `TooLarge` if the request is not to be sent."""
        seconds, request_id = self._seconds(timeout_seconds), getattr(request, "request_id", "")
        check_size(request, self.max_request_bytes, request_id)
        return Attempts(self.retry, seconds, request_id, self.clock)

    def grouping(self) -> Grouping:
        """Return how the requests of batches are put together: several in a message, if answers may be as large as that needs."""
        largest = int({**_CHANNEL_OPTIONS, **self.options}[_RECEIVE_OPTION])
        return Grouping(is_bulk=not 0 <= largest < MIN_ANSWER_BYTES, max_bytes=min(MAX_BYTES, self.max_request_bytes))

    def batch(self, grouping: Grouping, timeout_seconds: float | None) -> Batch:
        """Start the clock for a batch that has so much time; None for as long as it takes."""
        deadline = self.deadline(timeout_seconds)
        return Batch(self.retry, deadline, self.clock, max_request_bytes=self.max_request_bytes, grouping=grouping)

    def batch_of_texts(self, grouping: Grouping, timeout_seconds: float | None) -> Batch:
        """Start a batch in which each request has its own time (None for the client's), and blank ones are answered here."""
        return Batch(
            self.retry,
            math.inf,
            self.clock,
            max_request_bytes=self.max_request_bytes,
            grouping=grouping,
            request_seconds=self._seconds(timeout_seconds),
            is_of_texts=True,
        )

    def deadline(self, timeout_seconds: float | None) -> float:
        """Return when so many seconds have passed, on the clock; never, for None."""
        return math.inf if timeout_seconds is None else self.clock() + self._seconds(timeout_seconds)

    def _seconds(self, timeout_seconds: float | None) -> float:
        """Return a call's time, None for the client's; raises `ValueError` if it cannot be used."""
        if timeout_seconds is None:
            return self.timeout_seconds
        _check_timeout(timeout_seconds)
        return timeout_seconds


def _check_timeout(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"timeout_seconds: {seconds} is not a number over 0")
    if seconds > MAX_TIMEOUT_SECONDS:
        raise ValueError(f"timeout_seconds: {seconds:g} is more than {MAX_TIMEOUT_SECONDS:g}")


# Schemes that gRPC itself understands: https://grpc.github.io/grpc/core/md_doc_naming.html
_GRPC_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p"})
_PLAIN_SCHEMES = frozenset({"http", "grpc"})
_TLS_SCHEMES = frozenset({"https", "grpcs"})

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_GRPC_TARGET = re.compile(rf"(?:{'|'.join(sorted(_GRPC_SCHEMES))}):.+", re.DOTALL)
_ADDRESS = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?P<port>:.*)?", re.DOTALL)
_NOT_IN_A_HOST = re.compile(r"[^\w.-]")


def grpc_target(target: str, *, is_secure: bool = False) -> str:
    """Return the target for gRPC.

    `HOST:PORT`, and `HOST` alone with our port, where a host is a name, an IPv4 address or an IPv6 address in brackets; the same
    after `http://` or `grpc://`, and, where there are credentials for TLS, after `https://` or `grpcs://`. A target of gRPC's
    own schemes (`dns:///name:8500`, `unix:/path`, `ipv4:10.0.0.1:8500,10.0.0.2:8500`, `xds:///name`) is returned as it is.

    Args:
        target: As the caller gave it.
        is_secure: Whether the connection has credentials.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is none of these; the message begins with `target: `.
    """
    if not isinstance(target, str):
        raise TypeError(f"target: a str is wanted, such as '127.0.0.1:{DEFAULT_PORT}', not {target!r}")
    if not target:
        raise ValueError(f"target: is empty; HOST:PORT is wanted, such as 127.0.0.1:{DEFAULT_PORT}")
    if is_grpc_target(target):
        return target
    if any(character.isspace() or not character.isprintable() for character in target):
        raise ValueError(f"target: {target!r} has a space or a control character in it")
    if url := _URL.fullmatch(target):
        return _address(_authority(target, url["scheme"].lower(), url["rest"], is_secure), target)
    return _address(target, target)


def is_grpc_target(target: str) -> bool:
    """Return whether a target has one of gRPC's own schemes."""
    return _GRPC_TARGET.fullmatch(target) is not None


def _authority(target: str, scheme: str, rest: str, is_secure: bool) -> str:
    """Return what a URL says of host and port."""
    authority = rest.removesuffix("/")
    if "@" in authority:  # which is not repeated: there may be a password in it
        raise ValueError(f"target: a {scheme}:// address with a user name in it; a bearer token is given as such")
    if scheme in _TLS_SCHEMES and not is_secure:
        raise ValueError(f"target: {target}: {scheme}:// alone does not turn TLS on: give credentials (credentials=, --ca) too")
    if scheme in _PLAIN_SCHEMES and is_secure:
        raise ValueError(f"target: {target}: {scheme}:// is plain text, but credentials for TLS are given")
    if scheme not in _PLAIN_SCHEMES | _TLS_SCHEMES:
        raise ValueError(f"target: {target}: {scheme}:// is not understood; give HOST:PORT")
    if re.search(r"[/?#]", authority):
        raise ValueError(f"target: {target}: a server has no path; give {scheme}://HOST:PORT")
    return authority


def _address(address: str, target: str) -> str:
    """Return `HOST:PORT` of what may be without the port."""
    if "," in address:
        raise ValueError(f"target: {target}: several addresses are given as ipv4:ADDRESS:PORT,ADDRESS:PORT")
    parts = _ADDRESS.fullmatch(address)
    is_bare_ipv6 = address.count(":") > 1 and not address.startswith("[")
    if parts is None or is_bare_ipv6:
        hint = "; an IPv6 address goes in brackets, as in [::1]:8500" if is_bare_ipv6 else ""
        raise ValueError(f"target: {target}: not HOST:PORT{hint}")
    host, port = parts["host"], parts["port"]
    if not host:
        raise ValueError(f"target: {target}: there is no host in it")
    if host.startswith("["):
        _check_ipv6(host[1:-1], target)
    elif wrong := _NOT_IN_A_HOST.search(host):
        raise ValueError(f"target: {target}: {wrong[0]!r} in the host; HOST:PORT is wanted")
    return f"{host}:{DEFAULT_PORT if port is None else _port(port[1:], target)}"


def _check_ipv6(text: str, target: str) -> None:
    address, _, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError as error:
        raise ValueError(f"target: {target}: {address!r} in the brackets is not an IPv6 address") from error
    if _NOT_IN_A_HOST.search(zone):
        raise ValueError(f"target: {target}: {zone!r} is no name of a network interface")


def _port(text: str, target: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536):
        raise ValueError(f"target: {target}: the port {text!r} is not a number from 1 to 65535")
    return int(text)


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata that names the active span; none where there is no span, or no OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:  # no span can have been started
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
