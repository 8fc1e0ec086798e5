"""Those who suffer: honest callers, each in a process of its own (`Apart`), so that the attacker's work is not theirs.

Moments are `time.monotonic()`, which all processes of a machine share.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.attacks.attack import percentile
from dragoman.v1 import generation_pb2, generation_pb2_grpc

CALL_SECONDS = 30.0
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0))


@dataclass(frozen=True, slots=True)
class Look:
    """One call of a watcher: when it began, how long it took, and what came: a health status, or a code."""

    began: float
    took: float
    status: str


class Prober:
    """Asks for something again and again, in a thread, until it is told to stop."""

    def __init__(self, address: str, period_seconds: float, kind: str = "health", token: str = "") -> None:
        """Start.

        Args:
            address: Of the server.
            period_seconds: From the start of one call to the next, at the least.
            kind: `health` for Check, `generate` for an answer of two tokens.
            token: Bearer token, empty for none.
        """
        self._looks: list[Look] = []
        self._is_over = threading.Event()
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._call: Any = self._check if kind == "health" else self._generate
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._period = period_seconds
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def looks(self) -> list[Look]:
        """Return what has been seen so far."""
        return list(self._looks)

    def stop(self) -> list[Look]:
        """Stop; return everything that was seen."""
        self._is_over.set()
        self._thread.join()
        self._channel.close()
        return self._looks

    def _run(self) -> None:
        while not self._is_over.is_set():
            began = time.monotonic()
            try:
                status = self._call()
            except grpc.RpcError as error:
                status = error.code().name
            took = time.monotonic() - began
            self._looks.append(Look(began, took, status))
            self._is_over.wait(max(0.0, self._period - took))

    def _check(self) -> str:
        stub = health_pb2_grpc.HealthStub(self._channel)
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS).status
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))

    def _generate(self) -> str:
        stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        request = generation_pb2.GenerateRequest(text="A dog runs.", max_new_tokens=2)
        stub.Generate(request, timeout=CALL_SECONDS, metadata=self._metadata)
        return "OK"


class Reader:
    """Reads streams of tokens, one after another."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)

    def read(self, seconds: float) -> "Pace":
        """Read for so long; return how fast it went."""
        stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        gaps: list[float] = []
        num_tokens = 0
        began = last = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 0:
            call = stub.GenerateStream(generation_pb2.GenerateRequest(text="A dog runs.", max_new_tokens=512), timeout=left)
            try:
                for message in call:
                    now = time.monotonic()
                    if message.tokens:
                        gaps.append(now - last)
                        num_tokens += len(message.tokens)
                    last = now
            except grpc.RpcError as error:
                gaps.append(time.monotonic() - last)
                code = error.code()
                if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    time.sleep(0.05)  # refused: it comes back soon
        return Pace(num_tokens / (time.monotonic() - began), gaps)


@dataclass(frozen=True, slots=True)
class Pace:
    """How tokens came: how many a second, and the seconds from one message to the next."""

    tokens_per_second: float
    gaps: list[float]

    @property
    def median_ms(self) -> float:
        """Median gap."""
        return percentile(self.gaps, 50) * 1000

    @property
    def p99_ms(self) -> float:
        """Gap that one in a hundred exceeds."""
        return percentile(self.gaps, 99) * 1000

    @property
    def longest_ms(self) -> float:
        """Longest gap."""
        return max(self.gaps, default=float("nan")) * 1000


class Crowd:
    """Callers that each send the same again as soon as they have their answer, until they are told to stop."""

    def __init__(self, address: str, num_callers: int, method: str, request: bytes, token: str = "", pause: float = 0.02) -> None:
        """Start.

        Args:
            address: Of the server.
            num_callers: Calls under way at once.
            method: Name of a unary one.
            request: Its message.
            token: Bearer token, empty for none.
            pause: Seconds to wait after a call that failed.
        """
        self.codes: dict[str, int] = {}
        self._is_over = threading.Event()
        self._pause = pause
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._call: Any = self._channel.unary_unary(f"/dragoman.v1.Generation/{method}")
        self._request = request
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_callers)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> dict[str, int]:
        """Cancel what runs; return how many calls ended with which code."""
        self._is_over.set()
        self._channel.close()
        for thread in self._threads:
            thread.join(CALL_SECONDS)
        return self.codes

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._call(self._request, timeout=CALL_SECONDS, metadata=self._metadata)
                code = "OK"
            except ValueError:  # the channel is closed
                return
            except grpc.RpcError as error:
                code = error.code().name
                self._is_over.wait(self._pause)
            with self._lock:
                self.codes[code] = self.codes.get(code, 0) + 1
