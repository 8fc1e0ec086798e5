"""From settings and a bundle to what runs it: one engine, or engines before a desk. Nothing is started here."""

from collections.abc import Callable

from msgspec.structs import replace

from dragoman.export.bundle import Bundle
from dragoman.server.config import ServerConfig
from dragoman.server.dispatch.replicated_engine import ReplicatedEngine
from dragoman.server.engine.messages import Ready, Statistics
from dragoman.server.engine.settings import DeviceSettings, EngineSettings
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.repository.sleeping_engine import SleepingEngine
from dragoman.server.supervisor import RestartPolicy, SupervisedEngine
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.weights_folder import weights_folder

ModelEngine = SupervisedEngine | ReplicatedEngine | SleepingEngine


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
) -> ModelEngine:
    """Return what runs a model.

    Args:
        config: The settings.
        bundle: Of the model.
        plan: How many engines, and where.
        metrics: Where they are observed.
        on_change: Called when the model has become ready, or is not any more.
        on_death: Called when an engine has ended by itself and is about to be started again.
        is_observed: Returns whether metrics count what it does; what an engine is asked to prove itself is nobody's request.
        first_replica: Number by which metrics know its first engine; those of a model's other versions have others.
    """
    name = bundle.manifest.name
    settings = engine_settings(config, bundle, plan)
    policy = RestartPolicy(config.restart_backoff_initial_seconds, config.restart_backoff_max_seconds, config.watchdog_seconds)

    def observe(statistics: Statistics) -> None:
        if is_observed():
            metrics.observe_statistics(name, statistics, first_replica)

    def observe_queue(statistics: Statistics) -> None:
        if is_observed():
            metrics.observe_queue(name, statistics, first_replica)

    def observe_engine(replica: int, statistics: Statistics) -> None:
        if is_observed():
            metrics.observe_engine(name, statistics, first_replica + replica)

    def note_death(replica: int) -> None:
        metrics.observe_restart(name, first_replica + replica)
        on_death()

    def tell(replica: int, ready: Ready | None, process_id: int | None) -> None:
        """Say how one engine is now."""
        if ready is not None:
            metrics.observe_load(name, ready.load_seconds)
        metrics.set_engine(name, ready is not None, process_id, first_replica + replica)

    if plan.num_replicas == 1 and config.front_ends == 1:

        def on_engine_change() -> None:
            tell(0, engine.ready, engine.process_id)
            on_change()

        engine = SupervisedEngine(
            name,
            settings[0],
            policy,
            is_inline=config.engine == "inline",
            on_statistics=observe,
            on_change=on_engine_change,
            on_restart=lambda: note_death(0),
        )
        return engine

    def on_replica_change(index: int) -> None:
        replica = engines.pool.replicas[index]
        tell(index, replica.ready, replica.process_id)

    engines = ReplicatedEngine(
        name,
        settings,
        policy,
        on_statistics=observe_queue,
        on_engine_statistics=observe_engine,
        on_change=on_change,
        on_engine_change=on_replica_change,
        on_restart=note_death,
    )
    return engines


def engine_settings(config: ServerConfig, bundle: Bundle, plan: EnginePlan) -> list[EngineSettings]:
    """Return what each engine of a model is started with."""
    device = DeviceSettings(
        config.device,
        config.gpu_memory_bytes,
        config.gpu_row_buckets,
        config.gpu_capacity_buckets,
        weights_folder(config.weights_cache, plan.num_replicas),
        config.gpu_attention_kernels,
        config.gpu_graphs,
        config.gpu_steps_ahead,
    )
    settings = EngineSettings(
        endpoint="",
        bundle=str(bundle.directory),
        num_threads=plan.num_threads,
        max_slots=config.max_slots,
        max_slots_per_request=config.max_slots_per_request,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        prefill_tokens_per_step=config.prefill_tokens_per_step,
        max_ahead=config.max_ahead,
        is_warmed_up=config.warmup,
        log_level=config.log_level,
        log_format=config.log_format,
        version=bundle.manifest.version,
        digest=bundle.digest,
        device=device,
    )
    return [replace(settings, cores=cores) for cores in plan.cores]
