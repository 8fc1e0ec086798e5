"""Placeholder of a model's engines while the model is unloaded."""

from dragoman.server.engine.client import EngineClient
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import NotReady


class SleepingEngine(EngineClient):
    """Refuses every request with `NotReady`; requests wait for the model before they get here, see `Repository.hold`.

    Attributes:
        process_ids: None.
    """

    process_ids: tuple[int, ...] = ()

    def __init__(self, name: str, settings: EngineSettings, num_replicas: int, device: str) -> None:
        """Describe engines that are not loaded.

        Args:
            name: Of the model.
            settings: Of its engines once it is loaded.
            num_replicas: Engines that it has then.
            device: Device that they have run on; empty if they never have.
        """
        super().__init__(name, None, settings, num_replicas)
        self.device = device

    @property
    def is_ready(self) -> bool:
        """True: requests are accepted, and load the model."""
        return True

    async def start(self, *, is_persistent: bool = False) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    async def until_ready(self) -> None:
        """Do nothing."""

    def _check(self) -> None:
        raise NotReady(f"model {self.name!r} is asleep")
