"""What an engine is started with: one struct, which crosses to its process as JSON."""

from typing import Literal

import msgspec

from dragoman.export.attention_kernels import USUAL
from dragoman.server.engine.scheduler import Limits
from dragoman.server.telemetry.logs import LogFormat

USUAL_SLOTS_PER_REQUEST = 16
"""Rows that a request may take at least, where there are so many and no setting says otherwise."""


class DeviceSettings(msgspec.Struct, frozen=True):
    """Where a model runs.

    Attributes:
        name: `auto`, `cpu`, `cuda` or `cuda:N`.
        max_memory_bytes: Of a CUDA device, that may be taken; 0 for nine tenths of what is free.
        row_buckets: Numbers of rows that a CUDA graph is captured for; none for the usual ones.
        capacity_buckets: Positions that caches on a CUDA device are laid out for; none for the usual ones.
        attention_kernels: That sessions on CUDA may use, see `dragoman.export.attention_kernels`.
        graphs: When steps on CUDA are captured as graphs, see `dragoman.server.runtime.device.steps`.
        is_ahead: Whether steps on CUDA are begun before they are asked for.
        weights_cache: Folder of files through which engines on the CPU share their weights; empty for copies of their own.
    """

    name: str = "auto"
    max_memory_bytes: int = 0
    row_buckets: tuple[int, ...] = ()
    capacity_buckets: tuple[int, ...] = ()
    weights_cache: str = ""
    attention_kernels: str = USUAL
    graphs: Literal["idle", "start", "never"] = "idle"
    is_ahead: bool = True


class EngineSettings(msgspec.Struct, frozen=True):
    """What an engine is started with.

    Attributes:
        endpoint: ZeroMQ address to listen on.
        bundle: Directory of the model.
        num_threads: Of ONNX Runtime.
        max_slots: See `Limits`, as the next three.
        max_waiting_requests: See `Limits`.
        max_waiting_tokens: See `Limits`.
        prefill_tokens_per_step: See `Limits`.
        is_warmed_up: Whether to run the model on made-up sources before reporting `Ready`.
        log_level: See `dragoman.server.config`, as the next.
        log_format: See `dragoman.server.config`.
        version: The bundle's, which the front end has read too; the engine refuses any other. Empty for whichever is there.
        digest: SHA-256 of the manifest that the front end has read, and checked; the engine refuses any other. Empty for whichever.
        device: Where the model runs.
        cores: That its process keeps to; none for all.
        max_slots_per_request: See `slots_per_request`; 0 for the usual ones.
        max_ahead: See `Limits`.
    """

    endpoint: str
    bundle: str
    num_threads: int
    max_slots: int
    max_waiting_requests: int
    max_waiting_tokens: int
    prefill_tokens_per_step: int
    is_warmed_up: bool
    log_level: str
    log_format: LogFormat
    version: str = ""
    digest: str = ""
    device: DeviceSettings = DeviceSettings()
    cores: tuple[int, ...] = ()
    max_slots_per_request: int = 0
    max_ahead: int = 0

    @property
    def slots_per_request(self) -> int:
        """See the function of that name."""
        return slots_per_request(self.max_slots, self.max_slots_per_request)

    @property
    def limits(self) -> Limits:
        """Return what the scheduler keeps to."""
        return Limits(
            self.max_slots, self.max_waiting_requests, self.max_waiting_tokens, self.prefill_tokens_per_step, self.max_ahead
        )


def slots_per_request(max_slots: int, max_slots_per_request: int) -> int:
    """Return how many rows one request may take, so that a few wide ones do not take them all; the front end refuses more.

    Args:
        max_slots: Rows there are.
        max_slots_per_request: As it is set; 0 for the usual part of them.
    """
    return min(max_slots_per_request or max(max_slots // 4, USUAL_SLOTS_PER_REQUEST), max_slots)
