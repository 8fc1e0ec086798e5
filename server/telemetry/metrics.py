"""What the server tells Prometheus: of requests and engines as others report it, of processes and GPUs as it asks."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from prometheus_client import CollectorRegistry, Gauge, Info, disable_created_metrics, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dragoman.server.engine import messages
from dragoman.server.telemetry.caller_metrics import CallerMetrics
from dragoman.server.telemetry.declarations import Declarations
from dragoman.server.telemetry.engine_metrics import EngineMetrics
from dragoman.server.telemetry.front_end_metrics import FrontEndMetrics
from dragoman.server.telemetry.model_metrics import ModelMetrics
from dragoman.server.telemetry.processes import open_gpu_source, read_process
from dragoman.server.telemetry.reload_metrics import ReloadMetrics
from dragoman.server.telemetry.series import Series, SummedRegistry
from dragoman.server.telemetry.version_metrics import VersionMetrics

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication


class Metrics:
    """The metrics of one server process, in the registry it is given.

    Attributes:
        labels: Names of each metric's labels, by its full name.
        callers: What counts for each caller.
        reloads: What counts files that change while the server runs.
        front_ends: What tells front ends apart, where there are several.
        versions: What tells versions of models apart.
    """

    def __init__(self, registry: CollectorRegistry, version: str = "unknown") -> None:
        """Start with nothing counted.

        Args:
            registry: Where they are collected.
            version: Version of the server, for `dragoman_build_info`.
        """
        # For the whole process: a series beside each counter and histogram that nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._models: dict[str, ModelMetrics] = {}
        self._engines: dict[tuple[str, int], EngineMetrics] = {}
        self._declared = Declarations(registry)
        Info("dragoman_build", "What runs.", registry=registry).info({"version": version})
        self.callers = CallerMetrics(registry)
        self.reloads = ReloadMetrics(registry)
        self.front_ends = FrontEndMetrics(registry)
        self.versions = VersionMetrics(registry)
        self._processes = _ProcessMetrics(registry)
        self._gpus = _GpuMetrics(registry)
        self.labels = self._declared.labels | {"dragoman_build_info": ("version",)} | self.callers.labels | self.reloads.labels
        self.labels |= dict.fromkeys(self._processes.names, ("model", "replica")) | dict.fromkeys(self._gpus.names, ("device",))
        self.labels |= dict.fromkeys(self.front_ends.names, ("front_end",)) | self.versions.labels

    def add_model(self, name: str, version: str, precision: str, device: str, num_slots: int, num_replicas: int = 1) -> None:
        """Start a model's series at zero, not ready; for a model already there, say what it is now.

        Call it before anything else is said of the model.

        Args:
            name: Of the model, as the next three.
            version: Of the bundle.
            precision: Of the bundle.
            device: Where it runs; empty for not known yet.
            num_slots: Of all its engines.
            num_replicas: Its engines.
        """
        self._declared.model_info.labels(name).info({"version": version, "precision": precision, "device": device})
        self._declared.slots.labels(name).set(num_slots)
        self._gpus.add(device)
        if name in self._models:
            self._models[name].num_slots = num_slots
        else:
            self._models[name] = ModelMetrics(self._declared, name, num_slots)
            self.add_engines(name, range(num_replicas))

    def add_engines(self, model: str, replicas: Iterable[int]) -> None:
        """Start series of a model's engines; those that are there stay as they are."""
        for replica in replicas:
            if (model, replica) not in self._engines:
                self._engines[model, replica] = EngineMetrics(self._declared, model, replica)

    def remove_engines(self, model: str, replicas: Iterable[int]) -> None:
        """End the series of some of a model's engines, which are gone for good."""
        for replica in replicas:
            if self._engines.pop((model, replica), None) is not None:
                self._processes.ids.pop((model, replica), None)
                self._declared.remove_engine(model, replica)
                if model in self._models:
                    self._models[model].forget(replica)

    def keep_models(self, names: Iterable[str]) -> None:
        """End the series of all models but some."""
        for name in self._models.keys() - set(names):
            self.remove_model(name)

    def remove_model(self, name: str) -> None:
        """End the series of a model that is no longer loaded; counts of its failures end too.

        What its engines still say while they finish what they have is not counted.
        """
        self._models.pop(name, None)
        for key in [key for key in self._engines if key[0] == name]:
            del self._engines[key]
            self._processes.ids.pop(key, None)
        self._declared.remove_model(name)

    def set_ready(self, model: str, is_ready: bool) -> None:
        """Say whether a model takes requests; one that does not has nothing waiting or running."""
        self._models[model].set_ready(is_ready)

    def set_engine(self, model: str, is_up: bool, process_id: int | None, replica: int = 0) -> None:
        """Say whether one of a model's engines takes requests, and which process it has; None for none of its own."""
        if (model, replica) not in self._engines:
            return
        self._engines[model, replica].set_up(is_up)
        if process_id is None:
            self._processes.ids.pop((model, replica), None)
        else:
            self._processes.ids[model, replica] = process_id

    def observe_load(self, model: str, seconds: float) -> None:
        """Record how long a model took to load and warm up."""
        self._declared.model_load.labels(model).observe(seconds)

    def set_device_memory(self, model: str, parts: Mapping[str, int]) -> None:
        """Say how a model's engine divides the memory of its device, bytes of each part; nothing for the CPU."""
        for part, size in parts.items():
            self._declared.gpu_plan.labels(model, part).set(size)

    def observe_restart(self, model: str, replica: int = 0) -> None:
        """Count an engine that is started again."""
        if (model, replica) in self._engines:
            self._engines[model, replica].restarts.inc()

    def observe_statistics(self, model: str, statistics: messages.Statistics, replica: int = 0) -> None:
        """Record what the only engine of a version of a model said after a step."""
        self.observe_engine(model, statistics, replica)
        self.observe_queue(model, statistics, replica)

    def observe_engine(self, model: str, statistics: messages.Statistics, replica: int = 0) -> None:
        """Record what one of a model's engines said after a step of its own and what it has."""
        if model in self._models and (model, replica) in self._engines:
            self._engines[model, replica].observe(statistics)
            self._models[model].observe_work(statistics)

    def observe_queue(self, model: str, statistics: messages.Statistics, replica: int = 0) -> None:
        """Record what waits for a version of a model and what runs, in all its engines, of which a replica is the first."""
        if model in self._models and (model, replica) in self._engines:
            self._models[model].observe_queue(replica, statistics)

    def observe_finished(self, model: str, request: messages.Request, num_source_tokens: int, finished: messages.Finished) -> None:
        """Record how a request ended in the engine: its tokens and, for an answer, its success and where its time went.

        Args:
            model: Name.
            request: It.
            num_source_tokens: As its caller is told: of a prompt, all.
            finished: How it ended.
        """
        if model in self._models:
            self._models[model].observe_finished(request, num_source_tokens, finished)

    def observe_scored(self, model: str, pair: messages.ScoreRequest, num_source_tokens: int, scored: messages.Scored) -> None:
        """Record a pair that was scored; arguments as `observe_finished`."""
        if model in self._models:
            self._models[model].observe_scored(pair, num_source_tokens, scored)

    def observe_failure(self, model: str, code: str, refusal: str = "") -> None:
        """Count a request that ended with an error.

        Args:
            model: Its model; a name that is not loaded is counted under the empty name.
            code: Name of the gRPC status.
            refusal: Why it was turned away before any work; empty if it was not.
        """
        name = model if model in self._models else ""
        self._declared.requests_failed.labels(name, code).inc()
        if refusal:
            self._declared.requests_rejected.labels(name, refusal).inc()

    def wsgi_app(self, ask: Callable[[], Iterable[Series]] = tuple) -> "WSGIApplication":
        """Return the application that answers a scrape.

        Args:
            ask: Returns what other processes have counted.
        """
        app: WSGIApplication = make_wsgi_app(cast(CollectorRegistry, SummedRegistry(self._registry, ask)))
        return app


class _ProcessMetrics(Collector):
    """The series of each engine that has a process of its own, read when Prometheus asks.

    Attributes:
        names: Of the metrics.
        ids: Of the processes, by model and replica.
    """

    names = ("dragoman_engine_resident_memory_bytes", "dragoman_engine_cpu_seconds_total", "dragoman_engine_open_fds")

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ids: dict[tuple[str, int], int] = {}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield what the kernel says; a process that is gone has no series."""
        memory = GaugeMetricFamily(self.names[0], "Memory that the engine's process has.", labels=["model", "replica"])
        cpu = CounterMetricFamily(self.names[1], "Processor time that the engine's process has used.", labels=["model", "replica"])
        files = GaugeMetricFamily(
            self.names[2], "Files and sockets that the engine's process has open.", labels=["model", "replica"]
        )
        for (model, replica), process_id in list(self.ids.items()):
            if (reading := read_process(process_id)) is not None:
                labels = [model, str(replica)]
                memory.add_metric(labels, reading.resident_memory_bytes)
                cpu.add_metric(labels, reading.cpu_seconds)
                files.add_metric(labels, reading.num_open_fds)
        yield from (memory, cpu, files)


class _GpuMetrics:
    """The series of each GPU that a model runs on, whichever and however many.

    Attributes:
        names: Of the metrics.
    """

    names = ("dragoman_gpu_memory_used_bytes", "dragoman_gpu_memory_total_bytes", "dragoman_gpu_utilization_ratio")

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["device"], registry=registry)

        self._memory_used = gauge(self.names[0], "GPU memory in use, by all processes.")
        self._memory_total = gauge(self.names[1], "GPU memory there is.")
        self._utilization = gauge(self.names[2], "Share of the last second or less in which the GPU computed.")
        self._devices: set[str] = set()

    def add(self, device: str) -> None:
        """Start a device's series, unless they are there, or it is no GPU, or NVML does not know it."""
        if device in self._devices or (source := open_gpu_source(device, os.environ.get("CUDA_VISIBLE_DEVICES", ""))) is None:
            return
        self._devices.add(device)
        self._memory_used.labels(device).set_function(lambda: source.read().memory_used_bytes)
        self._memory_total.labels(device).set_function(lambda: source.read().memory_total_bytes)
        self._utilization.labels(device).set_function(lambda: source.read().utilization_ratio)
