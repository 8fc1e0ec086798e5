"""Plan of a run: plain data, sent to the sender processes as JSON."""

import math
import random
from typing import Literal

import grpc
import msgspec

from dragoman.client.reach import Pem
from dragoman.client.settings import MAX_TIMEOUT_SECONDS
from dragoman.load.schedule import Arrivals, check_positive
from dragoman.model.errors import InputError

Kind = Literal["unary", "stream", "batch"]
KINDS: tuple[Kind, ...] = ("unary", "stream", "batch")
Fields = dict[str, int | float | bool | str | list[int]]


Distribution = Literal["constant", "uniform", "normal", "lognormal"]
MOST_WORDS = 10_000


class Lengths(msgspec.Struct, frozen=True):
    """Distribution of the number of words of a generated source."""

    # `constant:N`, `uniform:LEAST:MOST`, `normal:MEAN:DEVIATION` or `lognormal:MEAN:DEVIATION`; the two of the last are those of
    # the lengths, not of their logarithms.
    kind: Distribution
    parameters: tuple[float, ...]  # the numbers

    def draw(self, draws: random.Random) -> int:
        """Return a length, 1 to `MOST_WORDS`."""
        match self.kind:
            case "constant":
                value = self.parameters[0]
            case "uniform":
                value = float(draws.randint(round(self.parameters[0]), round(self.parameters[1])))
            case "normal":
                value = draws.gauss(*self.parameters)
            case "lognormal":
                mean, deviation = self.parameters
                variance = math.log1p((deviation / mean) ** 2)
                value = draws.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
        return min(max(1, round(value)), MOST_WORDS)


class Injections(msgspec.Struct, frozen=True):
    """Calls that misbehave on purpose; shares are of all calls, and a call misbehaves in one way only."""

    cancel_share: float = 0.0  # calls that are cancelled
    cancel_seconds: float = 0.02  # time from sending to cancelling
    deadline_share: float = 0.0  # calls with a short deadline
    deadline_seconds: float = 0.02  # that deadline
    slow_share: float = 0.0  # streams that are read slowly
    slow_seconds: float = 0.05  # wait before each message is read
    malformed_share: float = 0.0  # requests that a server must refuse

    def shares(self) -> dict[str, float]:
        """Return the share of each kind of misbehaviour."""
        return {name: getattr(self, f"{name}_share") for name in ("cancel", "deadline", "slow", "malformed")}


class Server(msgspec.Struct, frozen=True):
    """Server that is called."""

    target: str  # gRPC target; one with several addresses is balanced call by call
    authority: str | None = None  # host that calls name, and a certificate; None for the target's
    pem: Pem | None = None  # certificates and keys of TLS; None for plain text
    server_name: str = ""  # name that the certificate must have, where it is another than the host's; empty for that one
    token: str | None = None  # bearer token; None for none

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel; None for plain text."""
        return None if self.pem is None else self.pem.credentials()

    def options(self) -> dict[str, str | int]:
        """Return the options of a channel, by their gRPC names."""
        named = {"grpc.default_authority": self.authority, "grpc.ssl_target_name_override": self.server_name}
        return {name: value for name, value in named.items() if value}


class Work(msgspec.Struct, frozen=True):
    """Content of the calls."""

    texts: str | None = None  # file of sources, one a line; None for generated ones
    words: Lengths = Lengths("uniform", (5.0, 25.0))  # lengths of generated sources
    mix: dict[Kind, float] = msgspec.field(default_factory=lambda: {"unary": 1.0})  # shares of the kinds of call
    batch_size: int = 16  # requests of a batch call
    beams: dict[int, float] = {}  # shares of the widths of beam search; empty leaves the width to the server
    fields: Fields = {}  # other fields of every request, by name


class Plan(msgspec.Struct, frozen=True):
    """One run, or one sender process's part of it.

    Exactly one of `arrivals`, `trace` and `concurrency` is set.
    """

    server: Server  # server that is called
    work: Work = Work()  # content of the calls
    seconds: float = 30.0  # time in which calls are sent
    warmup_seconds: float = 0.0  # the part of it, from the start, that does not count
    arrivals: Arrivals | None = None  # an open loop
    trace: str | None = None  # file of due times
    concurrency: int = 0  # callers that each wait for their answer
    max_calls: int | None = None  # calls at the most; None for as many as the time has
    max_in_flight: int = 10_000  # calls under way in a sender process; what is due beyond is not sent, and counted
    timeout_seconds: float = 60.0  # time of each call, retries included
    num_retries: int = 0  # further attempts after `UNAVAILABLE` and `RESOURCE_EXHAUSTED`
    injections: Injections = Injections()  # calls that misbehave
    slos: dict[str, float] = {}  # service levels: limits in seconds on `e2e`, `ttft` and `itl`
    seed: int = 0  # of everything that is drawn
    run_id: str = "load"  # start of all request ids
    process: int = 0  # number of the sender process
    num_processes: int = 1  # sender processes

    def check(self) -> None:
        """Raise `InputError` for a plan that cannot be carried out, naming the flag."""
        if sum((self.arrivals is not None, self.trace is not None, bool(self.concurrency))) != 1:
            raise InputError("give one of --rate, --trace and --concurrency")
        check_positive("--duration", self.seconds)
        check_positive("--timeout", self.timeout_seconds)
        if not 0 <= self.warmup_seconds < self.seconds:
            raise InputError(f"--warmup: {self.warmup_seconds:g} s leave nothing of {self.seconds:g} s to count")
        if self.timeout_seconds > MAX_TIMEOUT_SECONDS:
            raise InputError(f"--timeout: {self.timeout_seconds:g} is more than {MAX_TIMEOUT_SECONDS:g}")
        if self.concurrency and self.concurrency < self.num_processes:
            raise InputError("--concurrency: fewer callers than --processes")
        if self.arrivals is not None:
            self.arrivals.check()

    def parts(self) -> list["Plan"]:
        """Return the plan of each sender process: together they send what one alone would."""
        callers, rest = divmod(self.concurrency, self.num_processes)
        processes = range(self.num_processes)
        return [msgspec.structs.replace(self, process=number, concurrency=callers + (number < rest)) for number in processes]
