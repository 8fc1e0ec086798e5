"""What a run of the load generator sends, as its sender processes are told: plain data that travels as JSON."""

import math
from typing import Literal

import msgspec

from dragoman.client.reach import Pem
from dragoman.client.settings import MAX_TIMEOUT_SECONDS
from dragoman.load.arrivals import Arrivals
from dragoman.load.texts import Lengths
from dragoman.model.errors import InputError

Kind = Literal["unary", "stream", "batch"]
KINDS: tuple[Kind, ...] = ("unary", "stream", "batch")


class Injections(msgspec.Struct, frozen=True):
    """Calls that misbehave on purpose; shares are of all calls, and a call misbehaves in one way only.

    Attributes:
        cancel_share: Calls that are cancelled.
        cancel_seconds: How long after they were sent.
        deadline_share: Calls with a short deadline.
        deadline_seconds: That deadline.
        slow_share: Streams that are read slowly.
        slow_seconds: Wait before each message is read.
        malformed_share: Requests that a server must refuse.
    """

    cancel_share: float = 0.0
    cancel_seconds: float = 0.02
    deadline_share: float = 0.0
    deadline_seconds: float = 0.02
    slow_share: float = 0.0
    slow_seconds: float = 0.05
    malformed_share: float = 0.0

    def shares(self) -> dict[str, float]:
        """Return the share of each kind of misbehaviour."""
        return {
            "cancel": self.cancel_share,
            "deadline": self.deadline_share,
            "slow": self.slow_share,
            "malformed": self.malformed_share,
        }

    def check(self) -> None:
        """Raise `InputError` for values that mean nothing."""
        for name, share in self.shares().items():
            if not 0 <= share <= 1:
                raise InputError(f"--{name}-share: {share:g} is not from 0 to 1")
        if sum(self.shares().values()) > 1 + 1e-9:
            raise InputError("the shares of calls that misbehave are more than 1 together")
        for name in ("cancel", "deadline", "slow"):
            seconds = getattr(self, f"{name}_seconds")
            if not (math.isfinite(seconds) and seconds > 0):
                raise InputError(f"--{name}-seconds: {seconds:g} is not a number over 0")


class Server(msgspec.Struct, frozen=True):
    """Where calls go.

    Attributes:
        target: gRPC target; one with several addresses is balanced call by call.
        authority: Host that calls name; None for the target's.
        pem: What TLS needs; None for plain text.
        server_name: Name that the certificate must have, where it is another than the host's; empty for that one.
        token: Bearer token; None for none.
        connections: Connections of each sender process to each address.
    """

    target: str
    authority: str | None = None
    pem: Pem | None = None
    server_name: str = ""
    token: str | None = None
    connections: int = 1


class Work(msgspec.Struct, frozen=True):
    """What each call asks.

    Attributes:
        texts: File of sources, one a line; None for made-up ones.
        words: Lengths of made-up sources.
        num_joined: Lines or sentences joined into one source.
        mix: Shares of the kinds of call.
        batch_size: Requests of a batch call.
        beams: Shares of the widths of beam search; empty leaves the width to the server.
        search: Other fields of the request by name, as `dragoman.client.search.Search` has them.
        model: Model to ask.
        max_new_tokens: Tokens to generate at the most; None for the model's default.
        truncate: Cut sources that are too long.
        priority: Of every request.
        source_language: Of every request; empty for the model's default.
        target_language: Of every request; empty for the model's default.
        model_version: Of every request; empty for the policy's choice.
    """

    texts: str | None = None
    words: Lengths = Lengths("uniform", (5.0, 25.0))
    num_joined: int = 1
    mix: dict[Kind, float] = msgspec.field(default_factory=lambda: {"unary": 1.0})
    batch_size: int = 16
    beams: dict[int, float] = {}
    search: dict[str, int | float | bool | str] = {}
    model: str = ""
    max_new_tokens: int | None = None
    truncate: bool = False
    priority: int = 0
    source_language: str = ""
    target_language: str = ""
    model_version: str = ""


class Plan(msgspec.Struct, frozen=True):
    """One run, or one sender process's part of it.

    Exactly one of `arrivals`, `trace` and `concurrency` is set.

    Attributes:
        server: Where calls go.
        work: What they ask.
        seconds: How long calls are sent.
        warmup_seconds: The part of it, from the start, that does not count.
        arrivals: Calls that wait for nobody.
        trace: File that says when they are due.
        concurrency: Callers that each wait for their answer.
        max_calls: Calls at the most; None for as many as the time has.
        max_in_flight: Calls under way in a sender process; what is due beyond is not sent, and counted.
        timeout_seconds: Time of each call, retries included.
        num_retries: Further attempts after `UNAVAILABLE` and `RESOURCE_EXHAUSTED`.
        injections: Calls that misbehave.
        slos: What makes an answer good: limits in seconds on `e2e`, `ttft` and `itl`.
        seed: Of everything that is drawn.
        run_id: Start of all request ids.
        process: Number of the sender process.
        num_processes: Sender processes.
    """

    server: Server
    work: Work = Work()
    seconds: float = 30.0
    warmup_seconds: float = 0.0
    arrivals: Arrivals | None = None
    trace: str | None = None
    concurrency: int = 0
    max_calls: int | None = None
    max_in_flight: int = 10_000
    timeout_seconds: float = 60.0
    num_retries: int = 0
    injections: Injections = Injections()
    slos: dict[str, float] = {}
    seed: int = 0
    run_id: str = "load"
    process: int = 0
    num_processes: int = 1

    @property
    def is_open(self) -> bool:
        """Whether calls wait for nobody."""
        return not self.concurrency

    def check(self) -> None:
        """Raise `InputError` for a plan that cannot be carried out, naming the flag."""
        if sum((self.arrivals is not None, self.trace is not None, bool(self.concurrency))) != 1:
            raise InputError("give one of --rate, --trace and --concurrency")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError(f"--duration: {self.seconds:g} is not a number over 0")
        if not 0 <= self.warmup_seconds < self.seconds:
            raise InputError(f"--warmup: {self.warmup_seconds:g} s leave nothing of {self.seconds:g} s to count")
        if not (math.isfinite(self.timeout_seconds) and self.timeout_seconds > 0):
            raise InputError(f"--timeout: {self.timeout_seconds:g} is not a number over 0")
        if self.timeout_seconds > MAX_TIMEOUT_SECONDS:
            raise InputError(f"--timeout: {self.timeout_seconds:g} is more than {MAX_TIMEOUT_SECONDS:g}")
        if self.concurrency and self.concurrency < self.num_processes:
            raise InputError("--concurrency: fewer callers than --processes")
        if self.arrivals is not None:
            self.arrivals.check()
        self.injections.check()

    def parts(self) -> list["Plan"]:
        """Return the plan of each sender process: together they send what one alone would."""
        parts = []
        for process in range(self.num_processes):
            callers = self.concurrency // self.num_processes + (process < self.concurrency % self.num_processes)
            parts.append(msgspec.structs.replace(self, process=process, concurrency=callers))
        return parts
