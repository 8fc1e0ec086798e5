"""The search for a peer's best settings: one after the other, each by the rate that it keeps up with."""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.peers.server import Settings
from benchmarks.serving.goodput import Point

BATCH_SIZES = (16, 64)
DELAYS_MS = (0, 20)

Trial = Callable[[Settings, int, int, int], tuple[Point | None, dict[int, Point]]]
"""Starts the server with settings and looks for its knee, with `Ladder.find_knee`'s arguments; returns it, and all points."""


def first_settings(num_cores: int) -> Settings:
    """Return what the search starts from: a batch for each core."""
    return Settings(num_instances=num_cores, num_parts=1, num_threads=1, max_batch_size=32, delay_ms=5)


def latency_settings(num_cores: int) -> Settings:
    """Return what answers a single request soonest: all cores for it, and no delay."""
    return Settings(num_instances=1, num_parts=1, num_threads=num_cores, max_batch_size=32, delay_ms=0)


def layouts(best: Settings, num_cores: int) -> list[Settings]:
    """Return other ways to divide the cores: all for one batch, or a batch divided between them."""
    ways = dict.fromkeys([(1, 1, num_cores), (1, num_cores, 1)])
    found = [replace(best, num_instances=instances, num_parts=parts, num_threads=threads) for instances, parts, threads in ways]
    return [settings for settings in found if settings != best]


def batch_sizes(best: Settings, num_cores: int) -> list[Settings]:
    """Return smaller and larger batches."""
    return [replace(best, max_batch_size=size) for size in BATCH_SIZES]


def delays(best: Settings, num_cores: int) -> list[Settings]:
    """Return shorter and longer waits."""
    return [replace(best, delay_ms=delay) for delay in DELAYS_MS]


STAGES = (layouts, batch_sizes, delays)
"""What is varied, in this order, each from the best so far."""


def tune(trial: Trial, num_cores: int, start: int, lowest: int, stride: int) -> tuple[Settings, int]:
    """Return the best settings, and the rung that they kept up with.

    A challenger is measured at the rate that was too much for the best so far. It wins by keeping up with it, or by answering more
    requests in time although it does not.

    Args:
        trial: See there.
        num_cores: Threads of all batches together.
        start: Rung to begin at.
        lowest: Rung that the search gives up below.
        stride: Of the first climb.

    Raises:
        RuntimeError: If the first settings keep up with no rate.
    """
    settings = first_settings(num_cores)
    knee, points = trial(settings, start, lowest, stride)
    if not knee:
        raise RuntimeError(f"no rate is slow enough for {settings}")
    beyond = points[knee.rung + 1]
    for stage in STAGES:
        for challenger in stage(settings, num_cores):
            found, points = trial(challenger, beyond.rung, beyond.rung, 1)
            if found:
                settings, knee, beyond = challenger, found, points[found.rung + 1]
            elif points[beyond.rung].goodput > beyond.goodput:
                settings, beyond = challenger, points[beyond.rung]
    return settings, knee.rung
