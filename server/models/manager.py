"""All models of a server: their folder is looked at now and then, and each is led to what its policy wants (`model_keeper.py`)."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from dragoman.export.bundle import BundleError
from dragoman.server.models.discovery import FoundModel, find_unused, scan
from dragoman.server.models.reconciler import ModelReconciler
from dragoman.server.telemetry.server_metrics import VersionReading

log = structlog.get_logger("dragoman.repository")


class Keeper:
    """See above.

    Attributes:
        models: Each by its name; one of which nothing is found any more ends by itself.
    """

    def __init__(
        self,
        folder: Path,
        found: Sequence[FoundModel],
        make: Callable[[FoundModel], ModelReconciler],
        poll_seconds: float,
        files: Path | None = None,
    ) -> None:
        """Begin with what was found at the start.

        Args:
            folder: Of models.
            found: In it.
            make: Returns what leads a model that was not there before.
            poll_seconds: Pause between two looks; 0 for looking only when told to.
            files: Of files that take the place of `model.toml`; see `scan`.
        """
        self._folder, self._found, self._make, self._poll_seconds, self._files = folder, found, make, poll_seconds, files
        self.models = {model.name: make(model) for model in found}
        self._looking = asyncio.Lock()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._problem = ""
        self._unused: list[str] = []
        self._tell_unused([] if files is None else find_unused(files, found))

    async def run(self) -> None:
        """Lead all models, and look for ever; what is served at this moment has been started."""
        for name in self.models:
            self._run(name)
        try:
            while True:
                await asyncio.sleep(self._poll_seconds or 3600.0)
                if self._poll_seconds:
                    await self._look_again()
        finally:
            await self._leave()

    async def _look_again(self) -> None:
        """Look, and whatever comes of it, be there for the next look."""
        try:
            await self.look(is_at_once=False)
        except Exception:
            log.exception("cannot look at the models, those that are served stay")

    async def look(self, *, is_at_once: bool = True) -> None:
        """Look at the folder once.

        Args:
            is_at_once: Whether somebody asks for it: then also a file is used that was not the same at the last look.
        """
        async with self._looking:
            try:
                found, unused = await asyncio.to_thread(self._scan, is_at_once)
            except (BundleError, OSError) as error:
                self._tell(str(error))
                return
            except Exception:
                log.exception("cannot look at the models, those that are served stay")
                return
            if not found and self._found:  # a folder that is no longer mounted looks like that
                self._tell(f"{self._folder}: holds no model any more")
                return
            self._problem, self._found = "", found
            self._tell_unused(unused)
            for model in found:
                try:
                    self._note(model)
                except Exception:
                    log.exception("cannot take note of a model, the others go on", model=model.name)
            for name in self.models.keys() - {model.name for model in found}:
                self.models[name].lose()

    def _note(self, model: FoundModel) -> None:
        if model.name not in self.models:
            self.models[model.name] = self._make(model)
            self._run(model.name)
        else:
            self.models[model.name].find(model)

    @property
    def problem(self) -> str:
        """Why the folder could not be looked at the last time; empty if it could."""
        return self._problem

    def uses(self, directory: Path) -> bool:
        """Return whether the version in a directory is served, asleep or on its way; on any thread."""
        return any(model.uses(directory) for model in list(self.models.values()))

    async def refresh(self) -> None:
        """Look, and wait until every model is led to where it is to be."""
        await self.look()
        await self.settled()

    async def settled(self) -> None:
        """Wait until every model is led to where it is to be."""
        await asyncio.gather(*(model.settled() for model in list(self.models.values())))

    def readings(self) -> list[VersionReading]:
        """Return how all versions are, for metrics; on any thread."""
        return [reading for model in list(self.models.values()) for reading in model.readings()]

    def troubles(self) -> list[str]:
        """Return a line for each version that is refused, and for whatever else is not as is wanted; on any thread."""
        lines = [self._problem] if self._problem else []
        for name, model in sorted(self.models.items()):
            lines += [f"{name}: {trouble}" for trouble in model.troubles()]
        return lines

    async def stop(self) -> None:
        """End all engines."""
        await self._leave()
        await asyncio.gather(*(model.stop() for model in self.models.values()))

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            log.error("cannot look at the models, those that are served stay", reason=problem)
        self._problem = problem

    def _scan(self, is_at_once: bool) -> tuple[list[FoundModel], list[str]]:
        found = scan(self._folder, self._found, is_at_once, self._files)
        return found, [] if self._files is None else find_unused(self._files, found)

    def _tell_unused(self, unused: list[str]) -> None:
        if unused and unused != self._unused:
            log.warning("files of models that there are not", folder=str(self._files), files=unused)
        self._unused = unused

    def _run(self, name: str) -> None:
        """Lead a model, unless that is being done."""
        if name in self._running:
            return
        task = asyncio.create_task(self.models[name].run(), name=f"versions of {name}")
        self._running[name] = task

        def forget(_: asyncio.Task[None]) -> None:
            del self._running[name]
            if self.models[name].is_gone:
                del self.models[name]
            elif not task.cancelled():  # its folder has come back in this very moment
                self._run(name)

        task.add_done_callback(forget)

    async def _leave(self) -> None:
        """Lead no model any more."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
