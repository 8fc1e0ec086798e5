"""Bulk jobs on a Ray cluster, through Ray Data: tasks cut the inputs into shards, a pool of actors translates them.

Ray schedules, repeats what was on lost nodes, and bounds the shards in its object store. Inputs, the output folder and the bundle
have to be at the same paths on all nodes, or in an object store.
"""

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.bulk.job import Done, Event, Failure, Shard, Work, Worker
from dragoman.bulk.local import SHARDS_PER_ENGINE
from dragoman.bulk.storage import Input, open_output
from dragoman.export.bundle import Bundle
from dragoman.model.errors import InputError
from dragoman.server.engine.settings import DeviceSettings
from dragoman.server.runtime.weights_cache import weights_folder
from dragoman.server.workers.engines import CPU_PRECISIONS

# Files that are read at once.
MAX_READERS = 4


class RaySettings(msgspec.Struct, frozen=True):
    """Actors of a job: their numbers, and what Ray reserves for each."""

    address: str
    min_engines: int
    max_engines: int  # 0 for as many as the cluster has room for at the start
    num_cpus: float  # 0 for the engine's threads
    num_gpus: float  # 0 for those that the bundle needs


def run_on_ray(work: Work, inputs: Sequence[Input], settings: RaySettings) -> Generator[Done, None, None]:
    """Yield the shards that are done; raises as `run_locally`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # reports to Ray's makers, from an actor of its own
    import ray
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    is_on_cpu = Bundle.open(Path(work.settings.bundle), is_checked=False).manifest.precision in CPU_PRECISIONS
    num_gpus = settings.num_gpus or float(not is_on_cpu)
    num_threads = work.settings.num_threads or 1
    num_cpus = settings.num_cpus or num_threads
    try:
        ray.init(settings.address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"--ray {settings.address}: {str(error).partition(chr(10))[0]}") from error
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    room = ray.cluster_resources()
    most = settings.max_engines or max(1, int(room.get("GPU", 0) // num_gpus if num_gpus else room.get("CPU", 0) // num_cpus))
    most = max(most, settings.min_engines)
    # An actor has two shards, so that rows of the next take slots as they become free.
    strategy = ActorPoolStrategy(
        min_size=settings.min_engines,
        max_size=most,
        initial_size=most,  # an actor takes seconds to start
        max_tasks_in_flight_per_actor=SHARDS_PER_ENGINE,
        max_concurrent_calls_per_actor=SHARDS_PER_ENGINE,
        enable_true_multi_threading=True,
    )
    files = [{"input": msgspec.msgpack.encode(source)} for source in inputs]
    shards = ray.data.from_items(files, override_num_blocks=len(files))
    shards.context.target_max_block_size = 1  # a shard is a block, which one actor has
    shards.context.autoscaling_config.actor_pool_util_upscaling_threshold = 0.75  # of their shards
    shards.context.enable_progress_bars = False
    events = shards.flat_map(_cut, fn_args=[work], num_cpus=0, compute=TaskPoolStrategy(MAX_READERS)).map_batches(
        _Actor,
        fn_constructor_args=[replace(work, settings=replace(work.settings, num_threads=num_threads))],
        batch_size=1,
        compute=strategy,
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )
    for row in events.iter_rows():
        event = msgspec.msgpack.decode(row["event"], type=Event)
        if isinstance(event, Failure):
            raise event.error()
        assert isinstance(event, Done)
        yield event


def _cut(row: dict[str, Any], work: Work) -> Iterator[dict[str, Any]]:
    """Yield the shards of a file, on any node."""
    source = msgspec.msgpack.decode(row["input"], type=Input)
    try:
        for event in work.pending(source, open_output(work.output)):
            yield {"event": msgspec.msgpack.encode(event)}
    except Exception as error:
        yield {"event": msgspec.msgpack.encode(Failure.of(error))}


class _Actor:
    """An engine of the cluster."""

    def __init__(self, work: Work) -> None:
        device = DeviceSettings(work.settings.device.name, weights_cache=weights_folder("auto", SHARDS_PER_ENGINE))
        self._worker = Worker(replace(work, settings=replace(work.settings, device=device)))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the end of a shard."""
        event = msgspec.msgpack.decode(batch["event"][0], type=Event)
        if isinstance(event, Shard):
            event = self._worker.submit(event).result()
        return {"event": [msgspec.msgpack.encode(event)]}
