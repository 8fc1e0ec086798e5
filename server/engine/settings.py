"""Settings of an engine process: one struct, passed to it as JSON."""

from dataclasses import dataclass

import msgspec

from dragoman.server.telemetry.logs import LogFormat

# Running requests stall no longer than encoding so many takes; with 2,048, throughput on the CPU was the same and stalls longer.
PREFILL_TOKENS_PER_STEP = 512
# Waiting requests whose sources are encoded beside others': more would wait too long in memory, fewer fill no batch.
MAX_PREFETCH = 16
USUAL_SLOTS_PER_REQUEST = 16
"""Rows that a request may take at least, where there are so many and no setting says otherwise."""


class DeviceSettings(msgspec.Struct, frozen=True):
    """Where a model runs.

    Attributes:
        name: `auto`, `cpu`, `cuda` or `cuda:N`.
        max_memory_bytes: Of a CUDA device, that may be taken; 0 for nine tenths of what is free.
        weights_cache: Folder of files through which engines on the CPU share their weights; empty for copies of their own.
    """

    name: str = "auto"
    max_memory_bytes: int = 0
    weights_cache: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine.

    Attributes:
        max_slots: Rows of the decode batch.
        prefill_tokens_per_step: Source tokens encoded, or read of prompts, between two decode steps, which bounds how long running
            requests stall; a single larger source is still encoded, alone, where it cannot be read in pieces.
        max_prefetch: Waiting requests whose sources may have been encoded already, see `prefill.py`.
    """

    max_slots: int
    prefill_tokens_per_step: int = PREFILL_TOKENS_PER_STEP
    max_prefetch: int = 0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of a model's queue.

    Attributes:
        max_waiting_requests: Requests that wait, beyond those that free slots are about to take.
        max_waiting_tokens: Their tokens; a single larger request still fits an empty queue.
    """

    max_waiting_requests: int
    max_waiting_tokens: int


class EngineSettings(msgspec.Struct, frozen=True):
    """Settings of an engine.

    Attributes:
        endpoint: ZeroMQ address to listen on.
        bundle: Directory of the model.
        num_threads: Of ONNX Runtime.
        max_slots: See `Limits`.
        max_waiting_requests: See `QueueLimits`, as the next.
        max_waiting_tokens: See `QueueLimits`.
        log_level: See `dragoman.server.config`, as the next.
        log_format: See `dragoman.server.config`.
        version: The bundle's, which the front end has read too; the engine refuses any other. Empty for whichever is there.
        digest: SHA-256 of the manifest that the front end has read, and checked; the engine refuses any other. Empty for whichever.
        device: Where the model runs.
        cores: That its process keeps to; none for all.
        max_slots_per_request: See `slots_per_request`; 0 for the usual ones.
        is_warmed_up: Whether the model is run on made-up sources before `Ready` is reported.
    """

    endpoint: str
    bundle: str
    num_threads: int
    max_slots: int
    max_waiting_requests: int
    max_waiting_tokens: int
    log_level: str
    log_format: LogFormat
    version: str = ""
    digest: str = ""
    device: DeviceSettings = DeviceSettings()
    cores: tuple[int, ...] = ()
    max_slots_per_request: int = 0
    is_warmed_up: bool = True

    @property
    def slots_per_request(self) -> int:
        """See the function of that name."""
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
    """Return how many rows one request may take, so that a few wide ones do not take them all; the front end refuses more.

    Args:
        max_slots: Rows there are.
        max_slots_per_request: As it is set; 0 for the usual part of them.
    """
    return min(max_slots_per_request or max(max_slots // 4, USUAL_SLOTS_PER_REQUEST), max_slots)
