"""The model manager: scans the models folder periodically and reconciles each model with it."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import structlog

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError, ReadyRule
from dragoman.server.models.discovery import FoundModel, find_unused, scan
from dragoman.server.models.reconciler import ModelReconciler
from dragoman.server.telemetry.server_metrics import VersionReading

log = structlog.get_logger("dragoman.repository")


class ModelManager:
    """The models of a server, by name; `problem` is the reason why the last scan failed, or empty."""

    def __init__(
        self,
        folder: Path,
        found: Sequence[FoundModel],
        make: Callable[[FoundModel], ModelReconciler],
        poll_seconds: float,
        files: Path | None = None,
    ) -> None:
        """Start with the models of the first scan; `poll_seconds` 0 scans on request only, `files` is as in `scan`."""
        self._folder, self._found, self._make, self._poll_seconds, self._files = folder, found, make, poll_seconds, files
        self.models = {model.name: make(model) for model in found}
        self.problem = ""
        self._scanning = asyncio.Lock()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._unused: list[str] = []
        self._log_unused([] if files is None else find_unused(files, found))

    def check_ready_rule(self, rule: ReadyRule) -> None:
        """Raise `ConfigError` if `ready_when` names an unknown model."""
        if absent := sorted(rule.names.difference(self.models)):
            raise ConfigError(f"ready_when: there is no model {', '.join(absent)}; there are {', '.join(self.models)}")

    async def run(self) -> None:
        """Reconcile all models and scan until cancelled; the initial models must have been started."""
        for name in self.models:
            self._run(name)
        try:
            while True:
                await asyncio.sleep(self._poll_seconds or 3600.0)
                if self._poll_seconds:
                    await self.scan(is_at_once=False)
        finally:
            await self._leave()

    async def scan(self, *, is_at_once: bool = True) -> None:
        """Scan the folder once; `is_at_once` is as in `scan`."""
        async with self._scanning:
            try:
                found = await asyncio.to_thread(scan, self._folder, self._found, is_at_once, self._files)
                unused = [] if self._files is None else await asyncio.to_thread(find_unused, self._files, found)
            except (BundleError, OSError) as error:
                self._note_problem(str(error))
                return
            except Exception:
                log.exception("the models folder cannot be scanned, served versions stay")
                return
            if not found and self._found:  # for example when the folder is no longer mounted
                self._note_problem(f"{self._folder}: holds no model any more")
                return
            self.problem, self._found = "", found
            self._log_unused(unused)
            for model in found:
                try:
                    self._note(model)
                except Exception:
                    log.exception("a model cannot be updated, the others go on", model=model.name)
            for name in self.models.keys() - {model.name for model in found}:
                self.models[name].note_removed()

    def uses(self, directory: Path) -> bool:
        """Return whether the version in a directory is loaded, asleep or loading; callable on any thread."""
        return any(model.uses(directory) for model in list(self.models.values()))

    async def settled(self) -> None:
        """Wait until every model is settled."""
        await asyncio.gather(*(model.settled() for model in list(self.models.values())))

    def readings(self) -> list[VersionReading]:
        """Return the states of all versions, for metrics; callable on any thread."""
        return [reading for model in list(self.models.values()) for reading in model.readings()]

    def troubles(self) -> list[str]:
        """Return a line for each refused version and each other problem; callable on any thread."""
        lines = [self.problem] if self.problem else []
        for name, model in sorted(self.models.items()):
            lines += [f"{name}: {trouble}" for trouble in model.troubles()]
        return lines

    async def stop(self) -> None:
        """Stop reconciling, and stop all engines."""
        await self._leave()
        await asyncio.gather(*(model.stop() for model in self.models.values()))

    def _note(self, model: FoundModel) -> None:
        if model.name not in self.models:
            self.models[model.name] = self._make(model)
            self._run(model.name)
        else:
            self.models[model.name].update(model)

    def _note_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.error("the models folder cannot be scanned, served versions stay", reason=problem)
        self.problem = problem

    def _log_unused(self, unused: Collection[str]) -> None:
        if unused and unused != self._unused:
            log.warning("files of models that there are not", folder=str(self._files), files=unused)
        self._unused = list(unused)

    def _run(self, name: str) -> None:
        if name in self._running:
            return
        task = self._running[name] = asyncio.create_task(self.models[name].run(), name=f"versions of {name}")

        def forget(_: asyncio.Task[None]) -> None:
            del self._running[name]
            if self.models[name].is_gone:
                del self.models[name]
            elif not task.cancelled():  # its folder has reappeared in this moment
                self._run(name)

        task.add_done_callback(forget)

    async def _leave(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
