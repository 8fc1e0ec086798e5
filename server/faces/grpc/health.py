"""grpc.health.v1: what load balancers and Kubernetes ask.

`liveness` says that the process answers. The empty name, `readiness` and `dragoman.v1.Generation` say that every model takes
requests. A model's own name speaks for that model alone.
"""

import asyncio
from collections.abc import Iterable

from grpc_health.v1.health import aio
from grpc_health.v1.health_pb2 import HealthCheckResponse

from dragoman.server.core.ports import Model
from dragoman.v1 import generation_pb2

LIVENESS = "liveness"
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
OVERALL = ("", "readiness", GENERATION)


class Health:
    """Holds the answers; `servicer` gives them."""

    def __init__(self) -> None:
        """Start alive and not ready."""
        self.servicer = aio.HealthServicer()
        self._models: set[str] = set()
        # Telling a watcher takes a while; without the lock an older state could be published after a newer one.
        self._lock = asyncio.Lock()

    async def update(self, models: Iterable[Model], is_draining: bool) -> None:
        """Say how the models are now; who watches is told.

        Args:
            models: What is loaded.
            is_draining: Whether the server takes no new work, whatever the models are.
        """
        async with self._lock:
            ready = {model.name: model.engine.is_ready and not is_draining for model in models}
            is_all_ready = bool(ready) and all(ready.values())
            for name in self._models - ready.keys():
                await self.servicer.set(name, HealthCheckResponse.SERVICE_UNKNOWN)
            self._models = set(ready)
            statuses = ready | dict.fromkeys(OVERALL, is_all_ready) | {LIVENESS: True}
            for name, is_serving in statuses.items():
                await self.servicer.set(name, HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING)
