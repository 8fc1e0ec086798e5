"""Which front end does what, where there are several: the series of their processes, read when Prometheus asks."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dragoman.server.telemetry.processes import read_process


class Watched(Protocol):
    """A front end, as it is looked at."""

    number: int
    num_requests: int
    num_restarts: int

    @property
    def process_id(self) -> int | None:
        """Of its process; None while there is none."""
        ...

    @property
    def is_listening(self) -> bool:
        """Whether it answers callers."""
        ...


class FrontEndMetrics(Collector):
    """See above.

    Attributes:
        names: Of the metrics.
    """

    names = (
        "dragoman_front_end_up",
        "dragoman_front_end_restarts_total",
        "dragoman_front_end_requests_total",
        "dragoman_front_end_resident_memory_bytes",
        "dragoman_front_end_cpu_seconds_total",
        "dragoman_front_end_open_fds",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        """Start without any.

        Args:
            registry: Where they are collected.
        """
        self._watched: Sequence[Watched] = ()
        registry.register(self)

    def watch(self, front_ends: Sequence[Watched]) -> None:
        """Tell of these from now on."""
        self._watched = front_ends

    def collect(self) -> Iterator[Metric]:
        """Yield what is known; a process that is gone has no memory, time and files."""
        up = GaugeMetricFamily(self.names[0], "1 while a front end answers callers, else 0; of several.", labels=["front_end"])
        restarts = CounterMetricFamily(self.names[1], "Times a front end was started again after it died.", labels=["front_end"])
        requests = CounterMetricFamily(self.names[2], "Requests that ended at a front end.", labels=["front_end"])
        memory = GaugeMetricFamily(self.names[3], "Memory that a front end's process has.", labels=["front_end"])
        cpu = CounterMetricFamily(self.names[4], "Processor time that a front end's process has used.", labels=["front_end"])
        files = GaugeMetricFamily(self.names[5], "Files and sockets that a front end's process has open.", labels=["front_end"])
        for front_end in self._watched:
            label = [str(front_end.number)]
            up.add_metric(label, front_end.is_listening)
            restarts.add_metric(label, front_end.num_restarts)
            requests.add_metric(label, front_end.num_requests)
            process_id = front_end.process_id
            if process_id is not None and (reading := read_process(process_id)) is not None:
                memory.add_metric(label, reading.resident_memory_bytes)
                cpu.add_metric(label, reading.cpu_seconds)
                files.add_metric(label, reading.num_open_fds)
        yield from (up, restarts, requests, memory, cpu, files)
