"""Callers with their limits, deadlines and usage, on the event loop's thread; `Usage` may be shared with other processes."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, Self

from dragoman.server.buckets import Bucket
from dragoman.server.engine.messages import Share
from dragoman.server.errors import ClientFault, InvalidRequest, LimitReached, Unauthenticated
from dragoman.server.listening import digest_of
from dragoman.server.service.callers_file import Book, Entry, Limits
from dragoman.server.telemetry.server_metrics import CallerMeter, CallerMetrics

# Used where the time is unknown: a running request has to end first.
RETRY_SECONDS = 1.0
# Tolerance for floating-point sums: a bucket that lacks this little has the amount.
ALMOST = 1e-6

# Of a token in `authorization`, in lower case; the second is that of DeepL's clients.
SCHEMES = ("bearer", "deepl-auth-key")

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Default and maximum time budgets of requests; 0 for no limit."""

    default_seconds: float = 0.0
    max_seconds: float = 0.0

    def of(self, limits: Limits) -> "Deadlines":
        """Return a caller's deadlines: its own limits, else these."""
        default, longest = limits.default_deadline_seconds, limits.max_deadline_seconds
        return Deadlines(self.default_seconds if default is None else default, self.max_seconds if longest is None else longest)

    def time_left(self, arrival: float, remaining_seconds: float | None) -> tuple[float | None, str]:
        """Return the seconds a request may still take, None for no limit, and the limit that decided as "name of value", else "".

        `arrival` is `time.monotonic()`, `remaining_seconds` are until the request's own deadline.
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
    """A caller's usage; access only inside its `with`, which neither blocks nor is reentrant. Buckets are None without a limit."""

    num_running: int
    num_streams: int
    requests: Bucket | None
    tokens: Bucket | None

    def __enter__(self) -> Self:
        """Lock and read the usage."""
        ...

    def __exit__(self, *_: object) -> None:
        """Publish changes and unlock."""
        ...

    def change(self, requests: Bucket | None, tokens: Bucket | None) -> None:
        """Replace the buckets; call inside the `with`."""
        ...


class OwnUsage:
    """Usage within one process; `server/workers/shared_counters.py` has the shared one."""

    __slots__ = ("num_running", "num_streams", "requests", "tokens")

    def __init__(self, name: str) -> None:
        self.num_running = self.num_streams = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def change(self, requests: Bucket | None, tokens: Bucket | None) -> None:
        """Replace the buckets."""
        self.requests, self.tokens = requests, tokens


class Caller:
    """One caller with its limits and usage; kept across file changes as long as the name stays (`is_known`)."""

    def __init__(
        self,
        entry: Entry,
        meter: CallerMeter,
        usage: Usage,
        deadlines: Deadlines,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Create a caller with existing usage; `clock` is monotonic for rates, `wall_clock` since 1970 for the expiry."""
        self.name = entry.name
        self.is_known = True
        self._meter = meter
        self._usage = usage
        self._server_deadlines = deadlines
        self._clock, self._wall_clock = clock, wall_clock
        self.change(entry)

    def change(self, entry: Entry) -> None:
        """Replace the limits; bucket levels and counts stay."""
        limits = entry.limits
        self.limits = limits
        self.models = None if limits.models is None else frozenset(limits.models)
        self.deadlines = self._server_deadlines.of(limits)
        weight = 1.0 if limits.weight is None else limits.weight
        self.share = Share(self.name, weight, limits.max_slots or 0, limits.max_waiting or 0)
        self._max_requests = math.inf if limits.max_requests is None else limits.max_requests
        self._expiry = math.inf if entry.expires is None else entry.expires.timestamp()
        with self._usage as usage:
            usage.change(
                self._bucket(usage.requests, limits.requests_per_second, limits.requests_burst),
                self._bucket(usage.tokens, limits.tokens_per_second, limits.tokens_burst),
            )

    def forget(self) -> None:
        """Refuse new requests, after removal from the file; running requests continue."""
        self.is_known = False
        self._meter.close()

    @property
    def may_call(self) -> bool:
        """Whether the caller is in the file and not expired."""
        return self.is_known and self._wall_clock() < self._expiry

    @property
    def most_at_once(self) -> int | None:
        """Most requests of one call that may run at once; None for no limit."""
        limits = [limit for limit in (self.limits.max_requests, self.limits.max_waiting) if limit]
        return min(limits, default=None)

    def check(self) -> None:
        """Raise `Unauthenticated` if the caller is expired (counted) or no longer in the file."""
        if not self.is_known:
            raise Unauthenticated(f"authorization: caller {self.name!r} is not known any more")
        if self._expiry <= self._wall_clock():
            self._meter.refused("expires")
            when = datetime.fromtimestamp(self._expiry, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            raise Unauthenticated(f"authorization: caller {self.name!r} expired at {when}")

    def enter(self, *, is_counted: bool = True, is_background: bool = False) -> None:
        """Admit one request; call `leave` when it has ended. `is_counted` is false for the sentences of a counted request.

        Of each limit a background request leaves a half to others, and its refusals are not counted.

        Raises:
            LimitReached: If a limit refuses the request; nothing is taken then.
            Unauthenticated: See `check`.
        """
        self.check()
        with self._usage as usage:
            if is_background and (seconds := self._seconds_until_half(usage)) > 0:
                raise LimitReached("max_requests", "a half of the limits is for other requests", seconds)
            if usage.num_running >= self._max_requests:
                raise self.limit_reached("max_requests", f"{usage.num_running} are under way", RETRY_SECONDS)
            if usage.tokens is not None and (seconds := usage.tokens.seconds_until(ALMOST)) > 0:
                raise self.limit_reached("tokens_per_second", f"{usage.tokens.rate:g} are allowed", seconds)
            if is_counted:
                self._take_request(usage)
            usage.num_running += 1
        self._meter.num_running.inc()

    def leave(self, generated_tokens: int) -> None:
        """Release an admitted request and charge its generated tokens."""
        with self._usage as usage:
            usage.num_running -= 1
            if usage.tokens is not None and generated_tokens:
                usage.tokens.take(generated_tokens)
        self._meter.num_running.dec()
        if generated_tokens:
            self._meter.generated_tokens.inc(generated_tokens)

    def enter_stream(self) -> None:
        """Open a stream of requests, counted as a request but not as running; call `leave_stream` when it is closed.

        Raises as `enter`; `max_requests` limits open streams, too.
        """
        self.check()
        with self._usage as usage:
            if usage.num_streams >= self._max_requests:
                raise self.limit_reached("max_requests", f"{usage.num_streams} streams are open", RETRY_SECONDS)
            self._take_request(usage)
            usage.num_streams += 1

    def leave_stream(self) -> None:
        """Close a stream of requests."""
        with self._usage as usage:
            usage.num_streams -= 1

    def read(self, tokens: int) -> None:
        """Charge the tokens of a source, or of a source and a target."""
        self._meter.source_tokens.inc(tokens)
        if self.limits.tokens_per_second is None:
            return
        with self._usage as usage:
            if usage.tokens is not None:
                usage.tokens.take(tokens)

    def check_priority(self, priority: int) -> None:
        """Raise `InvalidRequest` if the priority is above the caller's `max_priority`."""
        highest = self.limits.max_priority
        if highest is not None and priority > highest:
            self._meter.refused("max_priority")
            raise InvalidRequest("priority", f"{priority} is above {highest}, max_priority of caller {self.name}")

    def check_slots(self, num_slots: int, field: str) -> None:
        """Raise `InvalidRequest` for `field` if a request needs more slots than the caller's `max_slots`."""
        most = self.limits.max_slots
        if most is not None and num_slots > most:
            self._meter.refused("max_slots")
            raise InvalidRequest(field, f"{num_slots} slots are needed; max_slots of caller {self.name} is {most}")

    def limit_reached(self, limit: str, reason: str, retry_after_seconds: float) -> ClientFault:
        """Count a refusal and return its error."""
        self._meter.refused(limit)
        return LimitReached(limit, f"{reason}; it is a limit of caller {self.name}", retry_after_seconds)

    def _seconds_until_half(self, usage: Usage) -> float:
        """Return the time until half of each limit is left; that of a running request is not known."""
        buckets = [bucket for bucket in (usage.requests, usage.tokens) if bucket is not None]
        seconds = [bucket.seconds_until(max(bucket.burst / 2, 1.0)) for bucket in buckets]
        return max([*seconds, RETRY_SECONDS if usage.num_running >= max(self._max_requests / 2, 1) else 0.0])

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
    """All callers, by token or certificate name."""

    def __init__(
        self,
        book: Book,
        metrics: CallerMetrics,
        deadlines: Deadlines = NO_DEADLINES,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        usage_of: Callable[[str], Usage] = OwnUsage,
    ) -> None:
        """Create the callers of a file; `deadlines` are the server's, for callers without, `usage_of` returns a usage by name."""
        self._metrics = metrics
        self._deadlines = deadlines
        self._clock, self._wall_clock, self._usage_of = clock, wall_clock, usage_of
        self._callers: dict[str, Caller] = {}
        self.replace(book)

    def replace(self, book: Book) -> None:
        """Replace the callers by those of another file; remaining callers keep their usage and running requests."""
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
        """Return all callers of the file."""
        return list(self._callers.values())

    def named(self, name: str) -> Caller | None:
        """Return the caller of a name; None if the file has none."""
        return self._callers.get(name)

    def identify(self, metadata: Metadata | None, names: Iterable[str] = ()) -> Caller:
        """Return the caller of the token, else of the certificate's `names`; raise `Unauthenticated` if unknown or expired."""
        caller = self.find(metadata, names)
        if caller is None:
            needed = "a bearer token" if self.has_tokens or not self.has_certificates else "a client certificate with a name"
            if self.has_tokens and self.has_certificates:
                needed += " or a client certificate"
            raise Unauthenticated(f"authorization: {needed} that this server knows is needed")
        caller.check()
        return caller

    def find(self, metadata: Metadata | None, names: Iterable[str] = ()) -> Caller | None:
        """Return the caller as `identify` does, expired or not; None if there is none."""
        shown = [value for key, value in metadata or () if key == "authorization"]
        if shown:
            return self._by_header(shown)
        found = (self._by_certificate.get(name) for name in names)
        return next((self._callers[name] for name in found if name is not None), None)

    def by_token(self, metadata: Metadata | None) -> Caller | None:
        """Return the caller of the token, expired or not; None without exactly one known token."""
        return self._by_header([value for key, value in metadata or () if key == "authorization"])

    def _by_header(self, shown: Sequence[str | bytes]) -> Caller | None:
        """Look up the token's digest, so that timing reveals nothing about known tokens."""
        value = shown[0] if len(shown) == 1 else ""
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        if scheme.lower() not in SCHEMES:
            return None
        name = self._by_token.get(digest_of(token))
        return None if name is None else self._callers[name]
