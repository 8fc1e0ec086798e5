"""What operators ask for, done by the keepers of models: what is asked is checked first, then led to, then looked at.

What cannot be done is undone. What operators ask for lasts until the server ends.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from dragoman.export.fields import shown
from dragoman.server.errors import Draining, InvalidRequest, NotInRepository, NotPossible, NotReady, ServiceError
from dragoman.server.models.manager import Keeper
from dragoman.server.models.policy import Overrides
from dragoman.server.models.reconciler import ModelReconciler
from dragoman.server.models.status import (
    check_loaded,
    is_called,
    is_name_served,
    is_served,
    stands_for,
    status_of,
    version_before,
    version_meant,
    version_names_of,
    why_not_served,
    why_refused,
)
from dragoman.server.models.version_names import check_version_name
from dragoman.server.service.administration import Listing, ModelStatus, Operator, Order
from dragoman.server.service.callers import RETRY_SECONDS
from dragoman.server.service.requests import MAX_NAME_CHARACTERS, check_model_name

log = structlog.get_logger("dragoman.administration")


class Administrator:
    """Changes the served versions of models, for as long as the server lives.

    Each change returns when it is made, or raises and has changed nothing; it goes on if nobody waits. All methods raise:

        InvalidRequest: If a name cannot be one.
        NotInRepository: If there is no such model, for this operator, or no such version or label.
        NotPossible: If it cannot be done, with the reason.
        Unavailable: If the server starts or ends.
    """

    def __init__(self, keeper: Keeper) -> None:
        """Answer questions only, until `begin`."""
        self._keeper = keeper
        self._turns: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[ModelStatus]] = set()
        self._is_begun = self._is_over = False

    def begin(self) -> None:
        """Make changes from now on: somebody leads the models to what is asked for."""
        self._is_begun = True

    async def end(self) -> None:
        """Make no change any more, and end those that are under way where they are."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def problem(self) -> str:
        """Why the models folder could not be read the last time; empty if it could."""
        return self._keeper.problem

    async def carry_out(self, operator: Operator, order: Order) -> Listing:
        """Carry out an order that came as data."""
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
        return Listing(tuple(models), self.problem)

    def list(self, operator: Operator, model: str = "") -> Sequence[ModelStatus]:
        """Return the status of one model, or of all that the operator may see, sorted by name."""
        if model:
            return [status_of(self._permitted(operator, model))]
        models = self._keeper.models
        return [status_of(models[name]) for name in sorted(models) if _may_see(operator, name)]

    async def load(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Serve a version beside the policy's; with an empty one exactly what the policy asks for."""

        async def load(keeper: ModelReconciler) -> None:
            asked, name = keeper.overrides, version_meant(keeper, version) if version else ""
            if not name:
                asked = replace(asked, is_unloaded=False, pinned=None, unloaded=frozenset())
                if keeper.would_want(asked).default is None:
                    raise NotPossible(why_not_served(keeper, asked))
                await self._lead(keeper, asked, lambda: keeper.route is not None, is_undone=False)
                return
            asked = replace(asked, is_unloaded=False, loaded=asked.loaded | {name}, unloaded=asked.unloaded - {name})
            await self._lead(keeper, asked, lambda: is_served(keeper, name), name)

        return await self._change(operator, "load", model, load, version=version)

    async def unload(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Stop serving a version; with an empty one the whole model."""

        async def unload(keeper: ModelReconciler) -> None:
            asked = keeper.overrides
            name = version if version in asked.loaded else version_meant(keeper, version) if version else ""
            if not name:
                await self._lead(keeper, replace(asked, is_unloaded=True), lambda: keeper.route is None)
                return
            check_loaded(keeper)
            if name not in version_names_of(keeper):  # it was loaded, and is gone: nobody asks for it any more
                await self._lead(keeper, replace(asked, loaded=asked.loaded - {name}), lambda: True)
                return
            pinned = None if asked.pinned == name else asked.pinned
            asked = replace(asked, loaded=asked.loaded - {name}, unloaded=asked.unloaded | {name}, pinned=pinned)
            if keeper.would_want(asked).default is None:
                raise NotPossible(f"version: {name} is the last that can be served; unload the model to have none")
            await self._lead(keeper, asked, lambda: not is_name_served(keeper, name))

        return await self._change(operator, "unload", model, unload, version=version)

    async def reload(self, operator: Operator, model: str) -> ModelStatus:
        """Read the model's folder now, and try again what was refused."""

        async def reload(keeper: ModelReconciler) -> None:
            await self._look()
            keeper.forgive()
            await keeper.settled()
            wanted = keeper.would_want(keeper.overrides, version_names_of(keeper))
            missing = [found.name for found in wanted.versions if not is_served(keeper, found.name)]
            reasons = [why_refused(keeper, name) or f"version {name} is not served" for name in missing]
            reasons = [*filter(None, (keeper.found.problem, keeper.found.file_problem)), *reasons]
            if reasons:
                raise NotPossible("; ".join(reasons))
            if keeper.is_gone:
                raise NotPossible("model: its folder is gone")

        return await self._change(operator, "reload", model, reload)

    async def rollback(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Have a version answer all requests that name none; an empty one means the one that did so before."""

        async def rollback(keeper: ModelReconciler) -> None:
            check_loaded(keeper)
            asked = keeper.overrides
            name = version_meant(keeper, version) if version else version_before(keeper)
            if not name:
                raise NotPossible("version: the model's folder holds one version, and there is none to go back to")
            asked = replace(asked, pinned=name, unloaded=asked.unloaded - {name})
            await self._lead(keeper, asked, lambda: is_served(keeper, name, is_default=True), name)

        return await self._change(operator, "rollback", model, rollback, version=version)

    async def set_label(self, operator: Operator, model: str, label: str, version: str) -> ModelStatus:
        """Have a label name a version; an empty one removes the label."""
        try:
            check_version_name(label)
        except ValueError as error:
            raise InvalidRequest("label", str(error)) from None

        async def set_label(keeper: ModelReconciler) -> None:
            check_loaded(keeper)
            if is_called(keeper, label):
                raise InvalidRequest("label", f"{label} is what a version is called")
            asked, file = keeper.overrides, keeper.found.file
            labels = {key: value for key, value in asked.labels.items() if key != label}
            if not version:
                there = sorted({key for key, value in {**file.labels, **asked.labels}.items() if value is not None})
                if label not in there:
                    raise NotInRepository("label", label, there)
                without: dict[str, str | None] = {label: None} if label in file.labels else {}
                await self._lead(keeper, replace(asked, labels=labels | without), lambda: not stands_for(keeper, label, None))
                return
            if not (name := version_meant(keeper, version)):
                raise NotPossible("version: the model's folder holds one version, which needs no label")
            if name in asked.unloaded:
                raise NotPossible(f"version: {name} was unloaded; load it first")
            await self._lead(keeper, replace(asked, labels=labels | {label: name}), lambda: stands_for(keeper, label, name), name)

        return await self._change(operator, "set_label", model, set_label, label=label, version=version)

    async def refresh(self, operator: Operator) -> Sequence[ModelStatus]:
        """Read all folders now; return the status of models when all are as wanted."""
        self._check_open()
        log.info("a change is asked for", change="refresh", by=operator.name)
        await self._look()
        await self._keeper.settled()
        return self.list(operator)

    async def _change(
        self,
        operator: Operator,
        change: str,
        model: str,
        work: Callable[[ModelReconciler], Awaitable[None]],
        **asked: str,
    ) -> ModelStatus:
        """Make a change when it is its turn; it goes on to its end though nobody waits for it any more.

        Args:
            operator: Who asks for it.
            change: What to call it in the log.
            model: Name of the model.
            work: Makes it.
            asked: What else is asked, for the log.
        """
        self._check_open()
        if len(asked.get("version", "")) > MAX_NAME_CHARACTERS:
            raise InvalidRequest("version", f"{len(asked['version'])} characters; at most {MAX_NAME_CHARACTERS} are allowed")
        if _may_see(operator, check_model_name(model)) and not self._is_known(model, asked.get("version", "")):
            await self._look()  # it may just have come
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
        told = {"change": change, "model": model, **{key: value for key, value in asked.items() if value}, "by": operator.name}
        try:
            self._check_open()
            keeper = self._permitted(operator, model)
            log.info("a change is asked for", **told)
            await work(keeper)
        except ServiceError as error:
            log.warning("a change cannot be made", **told, reason=error.message)
            raise
        except asyncio.CancelledError:
            log.warning("a change is not made to its end, for the server ends", **told)
            raise _draining() from None
        log.info("a change is made", **told)
        return status_of(keeper)

    async def _lead(
        self,
        keeper: ModelReconciler,
        asked: Overrides,
        is_done: Callable[[], bool],
        version: str | None = None,
        *,
        is_undone: bool = True,
    ) -> None:
        """Lead a model to what is asked for.

        Args:
            keeper: Of the model.
            asked: By operators, in all.
            is_done: Whether it is so, once all is done that can be.
            version: One that is tried again though it was refused, and without which nothing is done.
            is_undone: Whether what is not done is not asked for any more.

        Raises:
            NotPossible: If it is not done.
        """
        before = keeper.overrides
        if version is not None:
            keeper.forgive({version})
        keeper.ask(asked)
        await keeper.settled()
        if is_done():
            return
        reason = (version is not None and why_refused(keeper, version)) or why_not_served(keeper, asked)
        if is_undone:
            keeper.ask(before)
        raise NotPossible(reason)

    async def _look(self) -> None:
        """Look at the folder of models.

        Raises:
            NotPossible: If that cannot be done.
        """
        await self._keeper.look()
        if self._keeper.problem:
            raise NotPossible(f"the folder of models cannot be looked at: {self._keeper.problem}")

    def _is_known(self, model: str, version: str) -> bool:
        """Return whether there is a model, and a version of it if one is named."""
        keeper = self._keeper.models.get(model)
        return keeper is not None and (not version or is_called(keeper, version))

    def _permitted(self, operator: Operator, model: str) -> ModelReconciler:
        """Return who leads a model that an operator names.

        Raises:
            InvalidRequest: If no model can have the name.
            NotInRepository: If there is none that the operator may see.
        """
        names = sorted(name for name in self._keeper.models if _may_see(operator, name))
        if check_model_name(model) not in names:
            raise NotInRepository("model", shown(model), names)
        return self._keeper.models[model]

    def _check_open(self) -> None:
        if self._is_over:
            raise _draining()
        if not self._is_begun:
            raise NotReady("the server is starting", retry_after_seconds=RETRY_SECONDS)


def _draining() -> Draining:
    return Draining("the server is shutting down", retry_after_seconds=RETRY_SECONDS)


def _may_see(operator: Operator, model: str) -> bool:
    return operator.models is None or model in operator.models
