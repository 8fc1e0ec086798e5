"""What all calls of a client share: the channel's options, credentials, time and retries."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message

from dragoman.client.batch import Batch
from dragoman.client.errors import CallError, FailedCall, from_rpc_error
from dragoman.client.grouping import MAX_BYTES, MIN_ANSWER_BYTES, Grouping
from dragoman.client.retry import Attempts, RetryPolicy
from dragoman.client.sizes import DEFAULT_MAX_REQUEST_BYTES, SEND_OPTION, check_size
from dragoman.client.target import DEFAULT_PORT, grpc_target
from dragoman.client.trace import trace_metadata

DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"

ChannelOptions = Mapping[str, str | int]

_RECEIVE_OPTION = "grpc.max_receive_message_length"
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
# gRPC counts nanoseconds with a sign, in 64 bits, from a beginning of its own: what is longer than 292 years has passed at once.
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
    """What all calls of a client share.

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

    def channel_options(self) -> list[tuple[str, str | int]]:
        """Return the options for the channel; the caller's win over ours."""
        return list({**_CHANNEL_OPTIONS, **self.options}.items())

    @property
    def max_request_bytes(self) -> float:
        """Largest request that is sent."""
        value = int({**_CHANNEL_OPTIONS, **self.options}[SEND_OPTION])
        return math.inf if value < 0 else value

    def check_size(self, request: Message, request_id: str = "") -> None:
        """Do nothing if a request is small enough to be sent; raise `TooLarge` if not."""
        check_size(request, self.max_request_bytes, request_id)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call that is made here and now: it names the active span."""
        credentials = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        return credentials + trace_metadata()

    def error(self, failure: FailedCall, request_id: str = "") -> CallError:
        """Turn a failed call into the error of its status, which names the server where it could not be reached."""
        return from_rpc_error(failure, request_id, self.target)

    def attempts(self, timeout_seconds: float | None = None, request_id: str = "") -> Attempts:
        """Start the clock for one call."""
        if timeout_seconds is None:
            timeout_seconds = self.timeout_seconds
        else:
            _check_timeout(timeout_seconds)
        return Attempts(self.retry, timeout_seconds, request_id, self.clock)

    def grouping(self) -> Grouping:
        """Return how the requests of batches are put together: several in a message, if answers may be as large as that needs."""
        largest = int({**_CHANNEL_OPTIONS, **self.options}[_RECEIVE_OPTION])
        return Grouping(is_bulk=not 0 <= largest < MIN_ANSWER_BYTES, max_bytes=min(MAX_BYTES, self.max_request_bytes))

    def batch(self, grouping: Grouping, timeout_seconds: float | None) -> Batch:
        """Start the clock for a batch.

        Args:
            grouping: How its requests are put together.
            timeout_seconds: Time for all of it; None for as long as it takes.
        """
        deadline = self.deadline(timeout_seconds)
        return Batch(self.retry, deadline, self.clock, max_request_bytes=self.max_request_bytes, grouping=grouping)

    def batch_of_texts(self, grouping: Grouping, timeout_seconds: float | None) -> Batch:
        """Start a batch in which each request has its own time, and blank ones are answered here.

        Args:
            grouping: How its requests are put together.
            timeout_seconds: Time for each; None for the client's.
        """
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        _check_timeout(seconds)
        return Batch(
            self.retry,
            math.inf,
            self.clock,
            max_request_bytes=self.max_request_bytes,
            grouping=grouping,
            request_seconds=seconds,
            is_blank_answered=True,
        )

    def deadline(self, timeout_seconds: float | None) -> float:
        """Return when so many seconds have passed, on the clock; never, for None."""
        if timeout_seconds is None:
            return math.inf
        _check_timeout(timeout_seconds)
        return self.clock() + timeout_seconds


def _check_timeout(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"timeout_seconds: {seconds} is not a number over 0")
    if seconds > MAX_TIMEOUT_SECONDS:
        raise ValueError(f"timeout_seconds: {seconds:g} is more than {MAX_TIMEOUT_SECONDS:g}")
