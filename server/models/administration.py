"""Admin changes by operators: checked, applied by reconciliation, and undone if they fail; not persistent."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from dragoman.export.fields import shown
from dragoman.server.errors import Draining, InvalidRequest, NotInRepository, NotPossible, NotReady, ServiceError
from dragoman.server.models.manager import ModelManager
from dragoman.server.models.model_file import check_version_name
from dragoman.server.models.policy import Overrides
from dragoman.server.models.reconciler import ModelReconciler
from dragoman.server.models.status import (
    check_loaded,
    is_called,
    is_name_served,
    is_served,
    resolve_version,
    stands_for,
    status_of,
    version_before,
    version_names_of,
    why_not_served,
    why_refused,
)
from dragoman.server.service.administration import Listing, ModelStatus, Operator, Order
from dragoman.server.service.callers import RETRY_SECONDS
from dragoman.server.service.glossaries import FOLDER, NAME, SUFFIXES, Glossaries, GlossaryError, on_glossary_thread
from dragoman.server.service.requests import check_length

log = structlog.get_logger("dragoman.administration")


class Administrator:
    """Changes the served versions of models.

    Each change returns when it is made, and continues if its caller leaves. If a change fails, the earlier overrides are restored,
    except by `load` without a version. All methods raise:

        InvalidRequest: If a name is invalid.
        NotInRepository: If there is no such model, for this operator, or no such version or label.
        NotPossible: If it cannot be done, with the reason.
        Unavailable: If the server is starting or shutting down.
    """

    def __init__(self, manager: ModelManager, *, has_store: bool = False) -> None:
        """Change models of a manager; `has_store` is whether their folder mirrors a store."""
        self._manager, self._has_store = manager, has_store
        self._turns: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[ModelStatus]] = set()
        self._is_begun = self._is_over = False

    def begin(self) -> None:
        """Accept changes: the models are being reconciled."""
        self._is_begun = True

    async def end(self) -> None:
        """Reject further changes and cancel running ones."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def problem(self) -> str:
        """Return why the last scan of the models folder failed; empty if it did not."""
        return self._manager.problem

    async def carry_out(self, operator: Operator, order: Order) -> Listing:
        """Execute an `Order`."""
        model, version = order.model, order.version
        models: Sequence[ModelStatus]
        match order.verb:
            case "list":
                models = self.list(operator, model)
            case "refresh":
                models = await self.refresh(operator)
            case "load":
                models = [await self.load(operator, model, version)]
            case "unload":
                models = [await self.unload(operator, model, version)]
            case "reload":
                models = [await self.reload(operator, model)]
            case "rollback":
                models = [await self.rollback(operator, model, version)]
            case "label":
                models = [await self.set_label(operator, model, order.label, version)]
            case "put_glossary":
                models = [await self.put_glossary(operator, model, order.glossary, order.content, order.format)]
            case "delete_glossary":
                models = [await self.delete_glossary(operator, model, order.glossary)]
        return Listing(tuple(models), self.problem)

    def list(self, operator: Operator, model: str = "") -> Sequence[ModelStatus]:
        """Return the status of one model, or of all that the operator may see."""
        if model:
            return [status_of(self._permitted(operator, model))]
        models = self._manager.models
        return [status_of(models[name]) for name in sorted(models) if _may_see(operator, name)]

    async def load(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Serve a version beside the policy's; with an empty one the policy alone, whatever was unloaded or pinned."""

        async def load(one: ModelReconciler) -> None:
            asked, name = one.overrides, resolve_version(one, version) if version else ""
            if not name:
                asked = replace(asked, is_unloaded=False, pinned=None, unloaded=frozenset())
                if one.target(asked).default is None:
                    raise NotPossible(why_not_served(one, asked))
                await self._apply(one, asked, lambda: one.route is not None, is_undone=False)
                return
            asked = replace(asked, is_unloaded=False, loaded=asked.loaded | {name}, unloaded=asked.unloaded - {name})
            await self._apply(one, asked, lambda: is_served(one, name), name)

        return await self._change(operator, "load", model, load, version=version)

    async def unload(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Stop serving a version; with an empty one the whole model."""

        async def unload(one: ModelReconciler) -> None:
            asked = one.overrides
            name = version if version in asked.loaded else resolve_version(one, version) if version else ""
            if not name:
                await self._apply(one, replace(asked, is_unloaded=True), lambda: one.route is None)
                return
            check_loaded(one)
            if name not in version_names_of(one):  # it was loaded, and its files are gone
                await self._apply(one, replace(asked, loaded=asked.loaded - {name}), lambda: True)
                return
            pinned = None if asked.pinned == name else asked.pinned
            asked = replace(asked, loaded=asked.loaded - {name}, unloaded=asked.unloaded | {name}, pinned=pinned)
            if one.target(asked).default is None:
                raise NotPossible(f"version: {name} is the last that can be served; unload the model to have none")
            await self._apply(one, asked, lambda: not is_name_served(one, name))

        return await self._change(operator, "unload", model, unload, version=version)

    async def reload(self, operator: Operator, model: str) -> ModelStatus:
        """Scan the folder, and retry refused versions."""

        async def reload(one: ModelReconciler) -> None:
            await self._scan()
            one.retry_refused()
            await one.settled()
            wanted = one.target(one.overrides, version_names_of(one))
            missing = [found.name for found in wanted.versions if not is_served(one, found.name)]
            reasons = [why_refused(one, name) or f"version {name} is not served" for name in missing]
            reasons = [*filter(None, (one.found.problem, one.found.file_problem)), *reasons]
            if reasons:
                raise NotPossible("; ".join(reasons))
            if one.is_gone:
                raise NotPossible("model: its folder is gone")

        return await self._change(operator, "reload", model, reload)

    async def rollback(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Pin the default version; an empty one means the previous default."""

        async def rollback(one: ModelReconciler) -> None:
            check_loaded(one)
            asked = one.overrides
            name = resolve_version(one, version) if version else version_before(one)
            if not name:
                raise NotPossible("version: the model's folder holds one version, and there is none to go back to")
            asked = replace(asked, pinned=name, unloaded=asked.unloaded - {name})
            await self._apply(one, asked, lambda: is_served(one, name, is_default=True), name)

        return await self._change(operator, "rollback", model, rollback, version=version)

    async def set_label(self, operator: Operator, model: str, label: str, version: str) -> ModelStatus:
        """Assign a label to a version; an empty version removes the label."""
        try:
            check_version_name(label)
        except ValueError as error:
            raise InvalidRequest("label", str(error)) from None

        async def set_label(one: ModelReconciler) -> None:
            check_loaded(one)
            if is_called(one, label):
                raise InvalidRequest("label", f"{label} is what a version is called")
            asked, file = one.overrides, one.found.file
            labels = {key: value for key, value in asked.labels.items() if key != label}
            if not version:
                there = sorted({key for key, value in {**file.labels, **asked.labels}.items() if value is not None})
                if label not in there:
                    raise NotInRepository("label", label, there)
                without: dict[str, str | None] = {label: None} if label in file.labels else {}
                await self._apply(one, replace(asked, labels=labels | without), lambda: not stands_for(one, label, None))
                return
            if not (name := resolve_version(one, version)):
                raise NotPossible("version: the model's folder holds one version, which needs no label")
            if name in asked.unloaded:
                raise NotPossible(f"version: {name} was unloaded; load it first")
            await self._apply(one, replace(asked, labels=labels | {label: name}), lambda: stands_for(one, label, name), name)

        return await self._change(operator, "set_label", model, set_label, label=label, version=version)

    async def put_glossary(self, operator: Operator, model: str, name: str, content: bytes, format: str) -> ModelStatus:
        """Write a glossary into the model's folder, checked before."""
        if (suffix := f".{format}") not in SUFFIXES:
            raise InvalidRequest("format", f"{shown(format[:32])} is not tsv or tbx")
        return await self._write_glossary(operator, "put_glossary", model, name, suffix, content)

    async def delete_glossary(self, operator: Operator, model: str, name: str) -> ModelStatus:
        """Remove a glossary from the model's folder."""
        return await self._write_glossary(operator, "delete_glossary", model, name)

    async def _write_glossary(
        self, operator: Operator, change: str, model: str, name: str, suffix: str = "", content: bytes = b""
    ) -> ModelStatus:
        if NAME.fullmatch(check_length("name", name)) is None:
            raise InvalidRequest("name", f"{shown(name)} is no name: at most 64 letters, digits, '.', '_' and '-'")

        async def write(one: ModelReconciler) -> None:
            if self._has_store:
                raise NotPossible("glossaries: the folder of models is the copy of a store, from which no glossaries come")
            glossaries = Glossaries(one.found.directory / FOLDER)
            if not suffix and name not in (there := glossaries.names()):
                raise NotInRepository("name", shown(name), there)
            try:
                await on_glossary_thread(glossaries.write, name, suffix, content)
            except GlossaryError as error:
                raise InvalidRequest("content", str(error)) from None
            except OSError as error:
                raise NotPossible(f"glossaries: the model's folder cannot be written: {error.strerror}") from None
            await self._scan()

        return await self._change(operator, change, model, write, glossary=name)

    async def refresh(self, operator: Operator) -> Sequence[ModelStatus]:
        """Scan the folder, and return the status of all models once they are reconciled."""
        self._check_open()
        log.info("a change is asked for", change="refresh", by=operator.name)
        await self._scan()
        await self._manager.settled()
        return self.list(operator)

    async def _change(
        self,
        operator: Operator,
        change: str,
        model: str,
        work: Callable[[ModelReconciler], Awaitable[None]],
        **asked: str,
    ) -> ModelStatus:
        """Run `work` under the model's lock, to its end even if the caller leaves; `asked` are further parameters for the log."""
        self._check_open()
        check_length("version", asked.get("version", ""))
        if _may_see(operator, check_length("model", model)) and not self._is_known(model, asked.get("version", "")):
            await self._scan()  # it may be new
        self._permitted(operator, model)
        turn = self._turns.setdefault(model, asyncio.Lock())
        await turn.acquire()
        task = asyncio.create_task(self._do(operator, change, model, work, asked), name=f"{change} {model}")
        self._tasks.add(task)

        def forget(_: asyncio.Task[ModelStatus]) -> None:
            self._tasks.discard(task)
            turn.release()

        task.add_done_callback(forget)
        return await asyncio.shield(task)

    async def _do(
        self,
        operator: Operator,
        change: str,
        model: str,
        work: Callable[[ModelReconciler], Awaitable[None]],
        asked: dict[str, str],
    ) -> ModelStatus:
        fields = {"change": change, "model": model, **{key: value for key, value in asked.items() if value}, "by": operator.name}
        try:
            self._check_open()
            one = self._permitted(operator, model)
            log.info("a change is asked for", **fields)
            await work(one)
        except ServiceError as error:
            log.warning("a change cannot be made", **fields, reason=error.message)
            raise
        except asyncio.CancelledError:
            log.warning("a change is not made to its end, for the server ends", **fields)
            raise _draining() from None
        log.info("a change is made", **fields)
        return status_of(one)

    async def _apply(
        self,
        one: ModelReconciler,
        asked: Overrides,
        is_done: Callable[[], bool],
        version: str | None = None,
        *,
        is_undone: bool = True,
    ) -> None:
        """Reconcile with changed overrides; raise `NotPossible` unless `is_done` then, restoring the old ones if `is_undone`."""
        before = one.overrides
        if version is not None:
            one.retry_refused({version})
        one.override(asked)
        await one.settled()
        if is_done():
            return
        reason = (version is not None and why_refused(one, version)) or why_not_served(one, asked)
        if is_undone:
            one.override(before)
        raise NotPossible(reason)

    async def _scan(self) -> None:
        """Scan the models folder; raise `NotPossible` if that fails."""
        await self._manager.scan()
        if self._manager.problem:
            raise NotPossible(f"the folder of models cannot be looked at: {self._manager.problem}")

    def _is_known(self, model: str, version: str) -> bool:
        one = self._manager.models.get(model)
        return one is not None and (not version or is_called(one, version))

    def _permitted(self, operator: Operator, model: str) -> ModelReconciler:
        """Return a model of an operator; raise `InvalidRequest` for an invalid name, `NotInRepository` for an unknown one."""
        names = sorted(name for name in self._manager.models if _may_see(operator, name))
        if check_length("model", model) not in names:
            raise NotInRepository("model", shown(model), names)
        return self._manager.models[model]

    def _check_open(self) -> None:
        if self._is_over:
            raise _draining()
        if not self._is_begun:
            raise NotReady("the server is starting", retry_after_seconds=RETRY_SECONDS)


def _draining() -> Draining:
    return Draining("the server is shutting down", retry_after_seconds=RETRY_SECONDS)


def _may_see(operator: Operator, model: str) -> bool:
    return operator.models is None or model in operator.models
