"""Settings of an engine process, passed to it as JSON."""

from dataclasses import dataclass

import msgspec

from dragoman.server.runtime.elastic import WideSteps
from dragoman.server.telemetry.logs import LogFormat

# Bounds the stall of running requests; with 2,048, CPU throughput was the same and stalls were longer.
PREFILL_TOKENS_PER_STEP = 512
# More would stay in memory too long, fewer do not fill a batch.
MAX_PREFETCH = 16
# Default of `max_slots_per_request` unless a quarter of the slots is more.
USUAL_SLOTS_PER_REQUEST = 16


class DeviceSettings(msgspec.Struct, frozen=True):
    """Device of a model."""

    name: str = "auto"  # `auto`, `cpu`, `cuda` or `cuda:N`
    max_memory_bytes: int = 0  # limit on a CUDA device; 0 for nine tenths of the free memory
    weights_cache: str = ""  # folder through which engines on the CPU share weights; empty for copies of their own
    wide: WideSteps = WideSteps()  # steps on the CPU with more threads, where weights are shared


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine."""

    max_slots: int  # rows of the decode batch
    # Source tokens prefilled between two decode steps, which bounds stalls of running requests; a larger single source is still
    # encoded, alone, unless it can be read in pieces.
    prefill_tokens_per_step: int = PREFILL_TOKENS_PER_STEP
    max_prefetch: int = 0  # waiting requests whose sources may be encoded ahead, see `prefill.py`


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of a model's queue."""

    max_waiting_requests: int  # waiting requests, beyond those that free slots are about to take
    max_waiting_tokens: int  # tokens of the waiting requests; a larger single request still fits an empty queue


class EngineSettings(msgspec.Struct, frozen=True):
    """Settings of an engine; fields not listed are those of `Limits`, `QueueLimits` and `dragoman.server.config`."""

    endpoint: str  # ZeroMQ address to bind
    bundle: str  # directory of the model
    num_threads: int  # threads of ONNX Runtime
    max_slots: int
    max_waiting_requests: int
    max_waiting_tokens: int
    log_level: str
    log_format: LogFormat
    version: str = ""  # version of the bundle that the frontend has read; the engine refuses any other. Empty for any
    digest: str = ""  # SHA-256 of the manifest that the frontend has checked; the engine refuses any other. Empty for any
    device: DeviceSettings = DeviceSettings()
    cores: tuple[int, ...] = ()  # cores that the process is pinned to; empty for all
    max_slots_per_request: int = 0  # 0 for the default, see `slots_per_request`
    is_warmed_up: bool = True  # whether the model is run on dummy sources before `Ready`

    @property
    def slots_per_request(self) -> int:
        """Most rows of one request."""
        return slots_per_request(self.max_slots, self.max_slots_per_request)

    @property
    def limits(self) -> Limits:
        """Limits of the engine."""
        return Limits(self.max_slots, max_prefetch=MAX_PREFETCH)

    @property
    def queue_limits(self) -> QueueLimits:
        """Limits of the model's queue, the same in all of its engines' settings."""
        return QueueLimits(self.max_waiting_requests, self.max_waiting_tokens)


def slots_per_request(max_slots: int, max_slots_per_request: int) -> int:
    """Return the most rows of one request, so that a few wide ones do not take all; `max_slots_per_request` 0 is the default."""
    return min(max_slots_per_request or max(max_slots // 4, USUAL_SLOTS_PER_REQUEST), max_slots)
