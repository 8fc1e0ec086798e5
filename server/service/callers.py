"""Callers, their limits, and what they have used of them."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, Self

import structlog

from dragoman.server.buckets import Bucket
from dragoman.server.config import ServerConfig
from dragoman.server.engine.messages import Share
from dragoman.server.errors import ClientFault, InvalidRequest, LimitReached, Unauthenticated
from dragoman.server.listening import digest_of
from dragoman.server.service.callers_file import Book, Entry, Limits, read_book
from dragoman.server.telemetry.caller_metrics import CallerMeter, CallerMetrics
from dragoman.server.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long requests may take.

    Attributes:
        default_seconds: For a request that brings no deadline; 0 for any time.
        max_seconds: For every request; 0 for any time.
    """

    default_seconds: float = 0.0
    max_seconds: float = 0.0

    def of(self, limits: Limits) -> "Deadlines":
        """Return those of a caller: what its limits say, and these where they say nothing."""
        default, longest = limits.default_deadline_seconds, limits.max_deadline_seconds
        return Deadlines(self.default_seconds if default is None else default, self.max_seconds if longest is None else longest)

    def time_left(self, arrival: float, remaining_seconds: float | None) -> tuple[float | None, str]:
        """Return how long a request may still take, None for any time, and by which of these limits; an empty text for none.

        Args:
            arrival: When it came, by `time.monotonic()`.
            remaining_seconds: Until the deadline it brought, None if it brought none.
        """
        limit, seconds = "default_deadline_seconds", self.default_seconds
        if remaining_seconds is not None or not seconds or 0 < self.max_seconds < seconds:
            limit, seconds = "max_deadline_seconds", self.max_seconds
        if not seconds:
            return remaining_seconds, ""
        ours = arrival + seconds - time.monotonic()
        if remaining_seconds is not None and remaining_seconds <= ours:
            return remaining_seconds, ""
        return ours, f"{limit} of {seconds:g}"


NO_DEADLINES = Deadlines()


class Usage(Protocol):
    """One caller's. It is looked at and changed within its `with` alone, which does not wait and is not entered twice.

    Attributes:
        num_running: Requests under way.
        num_streams: Streams of requests that are open.
        requests: What limits the rate of requests; None where nothing does.
        tokens: The same of tokens.
    """

    num_running: int
    num_streams: int
    requests: Bucket | None
    tokens: Bucket | None

    def __enter__(self) -> Self:
        """See what has been used until now."""
        ...

    def __exit__(self, *_: object) -> None:
        """Have what was changed seen by whoever looks next."""
        ...

    def change(self, requests: Bucket | None, tokens: Bucket | None) -> None:
        """Have these buckets from now on; within the `with`, as everything."""
        ...


class OwnUsage:
    """What nobody else changes."""

    __slots__ = ("num_running", "num_streams", "requests", "tokens")

    def __init__(self, name: str) -> None:
        """Start with nothing used, whoever it is."""
        self.num_running = 0
        self.num_streams = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def __enter__(self) -> Self:
        """See `Usage`."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `Usage`."""

    def change(self, requests: Bucket | None, tokens: Bucket | None) -> None:
        """See `Usage`."""
        self.requests, self.tokens = requests, tokens


# When to come back where nobody can know: a request under way has to end first.
RETRY_SECONDS = 1.0
# A bucket has it again when this little is missing: sums of floating-point numbers are not exact.
ALMOST = 1e-6

Metadata = Iterable[tuple[str, str | bytes]]


class Caller:
    """One caller: its limits and what it has used of them; outlives changes of the file that keep its name.

    Attributes:
        name: As the file has it.
        limits: What it may have.
        share: What engines are told.
        models: Names of the models it may use; None for all.
        deadlines: How long its requests may take.
        is_known: Whether the file still has it.
    """

    def __init__(
        self,
        entry: Entry,
        meter: CallerMeter,
        usage: Usage,
        deadlines: Deadlines,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Go on from what has been used.

        Args:
            entry: What the file says.
            meter: What counts.
            usage: What has been used.
            deadlines: The server's own.
            clock: Seconds that only rise, for rates.
            wall_clock: Seconds since 1970, for the expiry.
        """
        self.name = entry.name
        self.is_known = True
        self._meter = meter
        self._usage = usage
        self._server_deadlines = deadlines
        self._clock, self._wall_clock = clock, wall_clock
        self.change(entry)

    def change(self, entry: Entry) -> None:
        """Have other limits from now on; levels and counts stay as they are."""
        limits = entry.limits
        self.limits = limits
        self.models = None if limits.models is None else frozenset(limits.models)
        self.deadlines = self._server_deadlines.of(limits)
        self.share = Share(
            self.name,
            1.0 if limits.weight is None else limits.weight,
            limits.max_slots or 0,
            limits.max_waiting or 0,
        )
        self._max_requests = math.inf if limits.max_requests is None else limits.max_requests
        self._expiry = math.inf if entry.expires is None else entry.expires.timestamp()
        with self._usage as usage:
            usage.change(
                self._bucket(usage.requests, limits.requests_per_second, limits.requests_burst),
                self._bucket(usage.tokens, limits.tokens_per_second, limits.tokens_burst),
            )

    def forget(self) -> None:
        """Know it no more: what it has under way goes on, and nothing new is taken of it."""
        self.is_known = False
        self._meter.close()

    @property
    def may_call(self) -> bool:
        """Whether it may call at all: it is in the file, and its time is not over."""
        return self.is_known and self._wall_clock() < self._expiry

    @property
    def most_at_once(self) -> int | None:
        """Requests that one call of several may have under way, so that its limits let all of them in; None for any number."""
        limits = [limit for limit in (self.limits.max_requests, self.limits.max_waiting) if limit]
        return min(limits, default=None)

    def check(self) -> None:
        """Do nothing if it may call at all; who is refused is counted.

        Raises:
            Unauthenticated: If it is expired, or not in the file any more.
        """
        if not self.is_known:
            raise Unauthenticated(f"authorization: caller {self.name!r} is not known any more")
        if self._expiry <= self._wall_clock():
            self._meter.refused("expires")
            when = datetime.fromtimestamp(self._expiry, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            raise Unauthenticated(f"authorization: caller {self.name!r} expired at {when}")

    def enter(self, *, is_counted: bool = True) -> None:
        """Take one request in; `leave` when it has ended.

        Args:
            is_counted: Whether it counts in `requests_per_second`; sentences of a request that has been counted do not.

        Raises:
            LimitReached: If a limit does not allow it now; nothing was taken then.
            Unauthenticated: See `check`.
        """
        self.check()
        with self._usage as usage:
            if usage.num_running >= self._max_requests:
                raise self.limit_reached("max_requests", f"{usage.num_running} are under way", RETRY_SECONDS)
            if usage.tokens is not None and (seconds := usage.tokens.seconds_until(ALMOST)) > 0:
                raise self.limit_reached("tokens_per_second", f"{usage.tokens.rate:g} are allowed", seconds)
            if is_counted:
                self._take_request(usage)
            usage.num_running += 1
        self._meter.num_running.inc()

    def leave(self, generated_tokens: int) -> None:
        """Let a request go that `enter` took in.

        Args:
            generated_tokens: Tokens generated for it.
        """
        with self._usage as usage:
            usage.num_running -= 1
            if usage.tokens is not None and generated_tokens:
                usage.tokens.take(generated_tokens)
        self._meter.num_running.dec()
        if generated_tokens:
            self._meter.generated_tokens.inc(generated_tokens)

    def enter_stream(self) -> None:
        """Open a stream of requests, which counts as a request, but not as one under way; `leave_stream` when it is closed.

        Raises:
            LimitReached: If a limit does not allow it now; there are as many streams as requests under way at the most.
            Unauthenticated: See `check`.
        """
        self.check()
        with self._usage as usage:
            if usage.num_streams >= self._max_requests:
                raise self.limit_reached("max_requests", f"{usage.num_streams} streams are open", RETRY_SECONDS)
            self._take_request(usage)
            usage.num_streams += 1

    def leave_stream(self) -> None:
        """Close a stream that `enter_stream` opened."""
        with self._usage as usage:
            usage.num_streams -= 1

    def read(self, tokens: int) -> None:
        """Take the tokens of a source, or of a pair, that is going to its engine."""
        self._meter.source_tokens.inc(tokens)
        if self.limits.tokens_per_second is None:
            return
        with self._usage as usage:
            if usage.tokens is not None:
                usage.tokens.take(tokens)

    def check_priority(self, priority: int) -> None:
        """Do nothing if a request may have this priority.

        Raises:
            InvalidRequest: If it may not.
        """
        highest = self.limits.max_priority
        if highest is not None and priority > highest:
            self._meter.refused("max_priority")
            raise InvalidRequest("priority", f"{priority} is above {highest}, max_priority of caller {self.name}")

    def check_slots(self, num_slots: int, field: str) -> None:
        """Do nothing if a request may take so many slots at once: more than the caller may have it would never get.

        Args:
            num_slots: Of the request.
            field: What makes them so many.

        Raises:
            InvalidRequest: If they are too many.
        """
        most = self.limits.max_slots
        if most is not None and num_slots > most:
            self._meter.refused("max_slots")
            raise InvalidRequest(field, f"{num_slots} slots are needed; max_slots of caller {self.name} is {most}")

    def limit_reached(self, limit: str, reason: str, retry_after_seconds: float) -> ClientFault:
        """Count a refusal; return the error that tells it."""
        self._meter.refused(limit)
        return LimitReached(limit, f"{reason}; it is a limit of caller {self.name}", retry_after_seconds)

    def _take_request(self, usage: Usage) -> None:
        if usage.requests is not None:
            if (seconds := usage.requests.seconds_until(1.0 - ALMOST)) > 0:
                raise self.limit_reached("requests_per_second", f"{usage.requests.rate:g} are allowed", seconds)
            usage.requests.take(1.0)
        self._meter.requests.inc()

    def _bucket(self, bucket: Bucket | None, rate: float | None, burst: int | None) -> Bucket | None:
        if rate is None:
            return None
        size = float(burst) if burst is not None else max(1.0, rate)
        if bucket is None:
            return Bucket(rate, size, self._clock)
        bucket.change(rate, size)
        return bucket


class Callers:
    """Knows callers by their credentials.

    Attributes:
        has_tokens: Whether there are tokens at all.
        has_certificates: Whether a certificate alone makes a caller known.
    """

    def __init__(
        self,
        book: Book,
        metrics: CallerMetrics,
        deadlines: Deadlines = NO_DEADLINES,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        usage_of: Callable[[str], Usage] = OwnUsage,
    ) -> None:
        """Know those of a file.

        Args:
            book: What the file says.
            metrics: Where they are counted.
            deadlines: The server's own, for those that have none of theirs.
            clock: Seconds that only rise, for rates.
            wall_clock: Seconds since 1970, for expiries.
            usage_of: Returns what a caller of a name has used.
        """
        self._metrics = metrics
        self._deadlines = deadlines
        self._clock, self._wall_clock, self._usage_of = clock, wall_clock, usage_of
        self._callers: dict[str, Caller] = {}
        self.replace(book)

    def replace(self, book: Book) -> None:
        """Know those of another file from now on; a caller that stays keeps what it has used and what it has under way."""
        for name in self._callers.keys() - book.entries.keys():
            self._callers.pop(name).forget()
        for name, entry in book.entries.items():
            if (caller := self._callers.get(name)) is not None:
                caller.change(entry)
            else:
                usage, clocks = self._usage_of(name), (self._clock, self._wall_clock)
                self._callers[name] = Caller(entry, self._metrics.open(name), usage, self._deadlines, *clocks)
        self._by_token: Mapping[bytes, str] = book.tokens
        self._by_certificate: Mapping[str, str] = book.certificates
        self.has_tokens, self.has_certificates = bool(book.tokens), bool(book.certificates)

    def all(self) -> Sequence[Caller]:
        """Return every caller of the file."""
        return list(self._callers.values())

    def identify(self, metadata: Metadata | None, names: Iterable[str] = ()) -> Caller:
        """Return who calls: whose token is shown, or, where none is shown, whom the certificate names.

        What is looked up of a token is its SHA-256 digest, so the time that takes says nothing of tokens there are.

        Args:
            metadata: What came beside the request: pairs of a key in lower case and a value.
            names: Names in the certificate that the caller has shown and the connection has verified.

        Raises:
            Unauthenticated: If that is nobody, or somebody whose time is over.
        """
        caller = self.find(metadata, names)
        if caller is None:
            raise Unauthenticated(self._what_is_needed())
        caller.check()
        return caller

    def find(self, metadata: Metadata | None, names: Iterable[str] = ()) -> Caller | None:
        """Return who calls, also if their time is over; None for nobody. See `identify`."""
        caller = self.by_token(metadata)
        if caller is None and not _shows_token(metadata):
            found = (self._by_certificate.get(name) for name in names)
            caller = next((self._callers[name] for name in found if name is not None), None)
        return caller

    def by_token(self, metadata: Metadata | None) -> Caller | None:
        """Return whose token is shown, expired or not; None if none that is known is, or more than one."""
        shown = [value for key, value in metadata or () if key == "authorization"]
        value = shown[0] if len(shown) == 1 else ""
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        if scheme.lower() != "bearer":
            return None
        name = self._by_token.get(digest_of(token))
        return None if name is None else self._callers[name]

    def _what_is_needed(self) -> str:
        if not self.has_certificates:
            return "authorization: a bearer token that this server knows is needed"
        if not self.has_tokens:
            return "authorization: a client certificate with a name that this server knows is needed"
        return "authorization: a bearer token or a client certificate that this server knows is needed"


def _shows_token(metadata: Metadata | None) -> bool:
    return any(key == "authorization" for key, _ in metadata or ())


log = structlog.get_logger("dragoman.callers")


def read_callers(
    config: ServerConfig, metrics: Metrics, deadlines: Deadlines, usage_of: Callable[[str], Usage] = OwnUsage
) -> Callers | None:
    """Return who may call; None if anybody may.

    Args:
        config: Names the file, if there is one.
        metrics: Where callers are counted.
        deadlines: The server's own.
        usage_of: Returns what a caller of a name has used of its limits.

    Raises:
        ConfigError: If the file cannot be used.
    """
    book = read_callers_book(config)
    return None if book is None else Callers(book, metrics.callers, deadlines, usage_of=usage_of)


def read_operators_book(config: ServerConfig) -> Book | None:
    """Return what the file of operators says; None if there is none, and whoever reaches the admin service may use it.

    Raises:
        ConfigError: If it cannot be used.
    """
    if config.admin_tokens_file is None:
        return None
    has_certificates = config.tls_client_ca is not None
    book = read_book(config.admin_tokens_file, has_client_certificates=has_certificates, setting="admin_tokens_file")
    for warning in book.warnings:
        log.warning("file of operators", warning=warning)
    return book


def read_callers_book(config: ServerConfig) -> Book | None:
    """Return what the file of callers says; None if there is none.

    Raises:
        ConfigError: If it cannot be used.
    """
    if config.auth_tokens_file is None:
        return None
    book = read_book(config.auth_tokens_file, has_client_certificates=config.tls_client_ca is not None)
    for warning in book.warnings:
        log.warning("file of callers", warning=warning)
    return book
