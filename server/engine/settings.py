"""What an engine is started with: one struct, which crosses to its process as JSON."""

import msgspec

from dragoman.server.engine.scheduler import Limits
from dragoman.server.telemetry.logs import LogFormat

# Waiting requests whose sources are encoded beside others': more would wait too long in memory, fewer fill no batch.
MAX_AHEAD = 16
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


class EngineSettings(msgspec.Struct, frozen=True):
    """What an engine is started with.

    Attributes:
        endpoint: ZeroMQ address to listen on.
        bundle: Directory of the model.
        num_threads: Of ONNX Runtime.
        max_slots: See `Limits`, as the next two.
        max_waiting_requests: See `Limits`.
        max_waiting_tokens: See `Limits`.
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
        """Return what the scheduler keeps to."""
        return Limits(self.max_slots, self.max_waiting_requests, self.max_waiting_tokens, max_ahead=MAX_AHEAD)


def slots_per_request(max_slots: int, max_slots_per_request: int) -> int:
    """Return how many rows one request may take, so that a few wide ones do not take them all; the front end refuses more.

    Args:
        max_slots: Rows there are.
        max_slots_per_request: As it is set; 0 for the usual part of them.
    """
    return min(max_slots_per_request or max(max_slots // 4, USUAL_SLOTS_PER_REQUEST), max_slots)
