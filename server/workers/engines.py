"""Creation of a model's engines from settings and bundle."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from msgspec.structs import replace

from dragoman.export.bundle import Bundle
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.engine.messages import Statistics
from dragoman.server.engine.settings import DeviceSettings, EngineSettings
from dragoman.server.runtime.elastic import WideSteps
from dragoman.server.runtime.plan import Sizes, measured_plan
from dragoman.server.runtime.weights_cache import weights_folder
from dragoman.server.system import available_cores
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.workers.pool import ReplicaPool
from dragoman.server.workers.supervisor import RestartPolicy

# Threads of an engine that is not measured: in steps of milliseconds or less, more threads mostly wait for each other.
USUAL_THREADS = 4
# Most engines of a model that are started without being asked for.
MAX_ENGINES = 16
# Precisions of bundles that never run on a GPU, see `runtime/providers.py`.
CPU_PRECISIONS = ("fp32", "int8")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Number of a model's engines, their threads, and the cores that each is pinned to (empty for all)."""

    num_threads: int
    cores: tuple[tuple[int, ...], ...]
    # Of a measured plan: steps with more threads, and the folder of weights that were shared to measure it.
    wide: WideSteps = field(default_factory=WideSteps)
    weights_cache: str = ""

    @property
    def num_replicas(self) -> int:
        """Number of engines."""
        return len(self.cores)


async def measure_engines(config: ServerConfig, bundle: Bundle, num_models: int, max_engines: int) -> EnginePlan | None:
    """Return the fastest plan of a model on its part of the cores; None where settings or the device decide, or it is unknown.

    It has at most `max_engines` or the usual number, rounded down to a power of two: free memory is not the same each time.
    """
    num_cores = _part_of_cores(num_models)
    is_on_cpu = not (config.device.startswith("cuda") or _may_be_on_gpu(config, bundle))
    if config.replicas or config.num_threads or num_cores == 1 or not is_on_cpu:
        return None
    folder = weights_folder(config.weights_cache, num_cores)
    max_engines = min(max(max_engines, _size(config, bundle, num_cores)[0]), MAX_ENGINES, num_cores)
    sizes = Sizes(num_cores, 1 << (max_engines.bit_length() - 1), config.max_slots)
    plan = await measured_plan(bundle, folder, sizes) if folder else None
    return None if plan is None else EnginePlan(plan.num_threads, ((),) * plan.num_replicas, plan.wide, folder)


def plan_engine(config: ServerConfig, bundle: Bundle, num_models: int) -> EnginePlan:
    """Return the usual, unpinned plan of one model on a machine that `num_models` share; raise `ConfigError` as `plan_engines`."""
    num_replicas, num_threads = _size(config, bundle, _part_of_cores(num_models))
    return EnginePlan(num_threads, ((),) * num_replicas)


def plan_engines(
    config: ServerConfig, bundles: Sequence[Bundle], own: Mapping[str, ServerConfig] = MappingProxyType({})
) -> dict[str, EnginePlan]:
    """Return the plan of each model, by name; `own` has settings of single models.

    Raises:
        ConfigError: If a model cannot have several engines, or there are too few cores to pin them to.
    """
    num_cores = _part_of_cores(len(bundles))
    names = [bundle.manifest.name for bundle in bundles]
    sizes = {name: _size(own.get(name, config), bundle, num_cores) for name, bundle in zip(names, bundles, strict=True)}
    cores: list[tuple[int, ...]] = [()] * sum(num_replicas for num_replicas, _ in sizes.values())
    if config.pin_engines:
        cores = divide_cores(len(cores), config.num_threads)
    plans: dict[str, EnginePlan] = {}
    for name, (num_replicas, num_threads) in sizes.items():
        plans[name] = EnginePlan(num_threads, tuple(cores[:num_replicas]))
        cores = cores[num_replicas:]
    return plans


def divide_cores(num_engines: int, num_threads: int) -> list[tuple[int, ...]]:
    """Return the cores of each engine, from the end of the affinity; raise `ConfigError` if no core is left for the frontend."""
    cores = sorted(os.sched_getaffinity(0))
    num_taken = num_engines * num_threads
    if num_taken >= len(cores):
        wanted = f"{num_engines} x {num_threads} threads and the front end"
        raise ConfigError(f"pin_engines: {wanted} need {num_taken + 1} cores; there are {len(cores)}")
    return [tuple(cores[start : start + num_threads]) for start in range(len(cores) - num_taken, len(cores), num_threads)]


def _part_of_cores(num_models: int) -> int:
    return max(1, available_cores() // max(1, num_models))


def _size(config: ServerConfig, bundle: Bundle, num_cores: int) -> tuple[int, int]:
    may_be_on_gpu = _may_be_on_gpu(config, bundle)
    if config.replicas > 1 and may_be_on_gpu:
        name, precision = bundle.manifest.name, bundle.manifest.precision
        raise ConfigError(
            f"replicas: model {name} ({precision}) may run on a GPU, which one engine fills; set device to cpu, or replicas to 1"
        )
    if config.replicas or config.num_threads:
        num_replicas = config.replicas or 1
        return num_replicas, config.num_threads or max(1, num_cores // num_replicas)
    if may_be_on_gpu:
        return 1, num_cores
    num_replicas = max(1, round(num_cores / USUAL_THREADS))
    return num_replicas, num_cores // num_replicas


def _may_be_on_gpu(config: ServerConfig, bundle: Bundle) -> bool:
    return config.device != "cpu" and bundle.manifest.precision not in CPU_PRECISIONS


def make_engine(
    config: ServerConfig,
    bundle: Bundle,
    plan: EnginePlan,
    metrics: Metrics,
    *,
    on_change: Callable[[], None],
    on_death: Callable[[], None] = lambda: None,
    is_observed: Callable[[], bool] = lambda: True,
    first_replica: int = 0,
) -> ReplicaPool:
    """Return the engines of a model, not started.

    `on_death` is called when a dead engine is about to be restarted. `is_observed` returns whether metrics count the work.
    `first_replica` is the number of the first engine in metrics, unique among the versions of the model.
    """
    name = bundle.manifest.name
    settings = engine_settings(config, bundle, plan)
    policy = RestartPolicy(watchdog_seconds=config.watchdog_seconds)

    def observe_queue(statistics: Statistics) -> None:
        if is_observed():
            metrics.observe_queue(name, statistics, first_replica)

    def observe_engine(replica: int, statistics: Statistics) -> None:
        if is_observed():
            metrics.observe_engine(name, statistics, first_replica + replica)

    def note_death(replica: int) -> None:
        metrics.observe_restart(name, first_replica + replica)
        on_death()

    def on_engine_change(index: int) -> None:
        supervisor = pool.replicas[index]
        if (ready := supervisor.ready) is not None:
            metrics.observe_load(name, ready.load_seconds)
        metrics.set_engine(name, ready is not None, supervisor.process_id, first_replica + index)

    pool = ReplicaPool(
        name,
        settings,
        policy,
        on_statistics=observe_queue,
        on_engine_statistics=observe_engine,
        on_change=on_change,
        on_engine_change=on_engine_change,
        on_restart=note_death,
    )
    return pool


def engine_settings(config: ServerConfig, bundle: Bundle, plan: EnginePlan) -> list[EngineSettings]:
    """Return the settings of each engine of a model."""
    weights_cache = plan.weights_cache or weights_folder(config.weights_cache, plan.num_replicas)
    settings = EngineSettings(
        endpoint="",
        bundle=str(bundle.directory),
        num_threads=plan.num_threads,
        max_slots=config.max_slots,
        max_slots_per_request=config.max_slots_per_request,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        log_level=config.log_level,
        log_format=config.log_format,
        version=bundle.manifest.version,
        digest=bundle.digest,
        device=DeviceSettings(config.device, config.gpu_memory_bytes, weights_cache, plan.wide),
    )
    return [replace(settings, cores=cores) for cores in plan.cores]
