"""Version loader: opens, measures, starts and self-tests one version."""

import asyncio
from collections.abc import Callable, Collection, Mapping

import structlog

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.signing import Keys, SignatureError
from dragoman.model.errors import InputError
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.engine.settings import slots_per_request
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.memory import Measured, needed_bytes
from dragoman.server.models.model_file import ModelFile
from dragoman.server.models.registry import Route
from dragoman.server.models.self_test import PROOF_SECONDS, ProofFailed, prove
from dragoman.server.models.sleeping_engine import SleepingEngine
from dragoman.server.models.version import Cause, Opened, Refused
from dragoman.server.service.languages import Frames
from dragoman.server.service.readiness import ReadyRule
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.processes import read_process
from dragoman.server.workers.engines import EnginePlan, ModelEngine, engine_settings, make_engine, plan_engine
from dragoman.server.workers.processors import give_back_blocks_soon


def check_slots(bundle: Bundle, max_slots: int, max_slots_per_request: int) -> None:
    """Do nothing if a request of which nothing is said can be served.

    Args:
        bundle: Of the model.
        max_slots: As it is set.
        max_slots_per_request: As it is set; 0 for the usual part of them.

    Raises:
        ConfigError: If the model's defaults need more slots than a request may take.
    """
    name, defaults = bundle.manifest.name, bundle.manifest.defaults
    limit = slots_per_request(max_slots, max_slots_per_request)
    for field in ("num_beams", "num_return_sequences"):
        if (needed := getattr(defaults, field) or 1) > limit:
            setting = "max_slots" if limit == max_slots else "max_slots_per_request"
            raise ConfigError(f"{setting}: requests may take {limit} slots, but {field} of model {name} is {needed} by default")


def check_ready_rule(names: Collection[str], rule: ReadyRule) -> None:
    """Do nothing if every model that `ready_when` names is there.

    Raises:
        ConfigError: Naming those that are not.
    """
    if missing := sorted(rule.names.difference(names)):
        raise ConfigError(f"ready_when: there is no model {', '.join(missing)}; there are {', '.join(names)}")


log = structlog.get_logger("dragoman.repository")


class ModelWorkshop:
    """See `server.models.workshop.Workshop`."""

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics,
        keys: Keys | None,
        *,
        num_models: Callable[[], int],
        on_change: Callable[[str], None],
        on_published: Callable[[str], None],
    ) -> None:
        """Make nothing yet.

        Args:
            config: The server's settings.
            metrics: Where engines are observed.
            keys: Of which one must have signed each bundle; None if they need not be signed.
            num_models: Returns how many models share the cores.
            on_change: Called with a model's name when one of its engines has become ready, or is not any more.
            on_published: Called with a model's name when others of its versions answer.
        """
        self.turn = asyncio.Lock()
        self.load_seconds = config.load_timeout_seconds
        self._config, self._metrics, self._keys = config, metrics, keys
        self._num_models, self._on_change, self._on_published = num_models, on_change, on_published
        self._pinned: Mapping[str, EnginePlan] = {}
        self._measured: dict[str, Measured] = {}

    def pin(self, plans: Mapping[str, EnginePlan]) -> None:
        """Have models that were there at the start keep to the cores they were given, whatever version they are in."""
        self._pinned = plans

    def open(self, model: str, found: FoundVersion, file: ModelFile) -> Opened:
        """See `Workshop`."""
        try:
            bundle = Bundle.open(found.directory, keys=self._keys)
            if bundle.manifest.name != model:
                raise BundleError(f"{found.directory}: is of model {bundle.manifest.name!r}, not of {model!r}")
            opened = Opened(bundle, bundle.tokenizers(), Frames(bundle.manifest))
        except (InputError, OSError) as error:
            cause = Cause.SIGNATURE if isinstance(error, SignatureError) else Cause.BUNDLE
            raise Refused(cause, str(error)) from error
        try:
            config = file.settings.within(self._config)
            check_slots(bundle, config.max_slots, config.max_slots_per_request)
            self._plan(bundle, config)
        except ConfigError as error:
            raise Refused(Cause.SETTINGS, str(error)) from error
        return opened

    def num_replicas(self, bundle: Bundle, file: ModelFile) -> int:
        """See `Workshop`."""
        return self._plan(bundle, file.settings.within(self._config)).num_replicas

    def measure(self, model: LoadedModel[ModelEngine] | None) -> None:
        """See `Workshop`."""
        if model is None:
            return
        if sizes := _resident_sizes(model):
            most = needed_bytes(model.bundle, model.engine.settings, len(sizes))
            self._measured[model.name] = Measured(sum(sizes), most, len(sizes))

    def reckon(self, bundle: Bundle, file: ModelFile) -> int:
        """See `Workshop`; what a GPU's memory does not hold its engine finds out before it takes any."""
        config = file.settings.within(self._config)
        plan, measured = self._plan(bundle, config), self._measured.get(bundle.manifest.name)
        return needed_bytes(bundle, engine_settings(config, bundle, plan)[0], plan.num_replicas, measured)

    def resident_bytes(self, model: LoadedModel[ModelEngine]) -> int:
        """See `Workshop`."""
        return sum(_resident_sizes(model))

    def sleeping(self, opened: Opened, file: ModelFile, label: str, device: str) -> LoadedModel[ModelEngine]:
        """See `Workshop`."""
        config, bundle = file.settings.within(self._config), opened.bundle
        plan = self._plan(bundle, config)
        name, settings = bundle.manifest.name, engine_settings(config, bundle, plan)[0]
        engine = SleepingEngine(name, settings, plan.num_replicas, device)
        return LoadedModel(bundle, opened.tokenizers, opened.frames, engine, label, traits=file.settings.traits)

    def load(
        self,
        opened: Opened,
        file: ModelFile,
        label: str,
        replicas: range,
        *,
        on_death: Callable[[], None] = lambda: None,
        is_observed: Callable[[], bool] = lambda: True,
    ) -> LoadedModel[ModelEngine]:
        """See `Workshop`."""
        config, bundle = file.settings.within(self._config), opened.bundle
        name = bundle.manifest.name
        self._metrics.add_engines(name, replicas)
        engine = make_engine(
            config,
            bundle,
            self._plan(bundle, config),
            self._metrics,
            on_change=lambda: self._on_change(name),
            on_death=on_death,
            is_observed=is_observed,
            first_replica=replicas.start,
        )
        return LoadedModel(bundle, opened.tokenizers, opened.frames, engine, label, traits=file.settings.traits)

    async def prove(self, model: LoadedModel[ModelEngine]) -> None:
        """See `Workshop`."""
        ready = model.engine.ready
        if ready is None:
            raise Refused(Cause.START, "its engine has ended")
        try:
            seconds = max(PROOF_SECONDS, self.load_seconds)  # what takes long to load takes long to answer
            proof = await prove(model.bundle, model.tokenizers, model.engine, ready.platform, model.device, seconds=seconds)
        except ProofFailed as error:
            raise Refused(Cause.PROOF, str(error)) from error
        if not proof.is_proved:
            log.warning("a bundle without sample answers cannot be proved", model=model.name, version=model.version)

    def forget(self, model: str, replicas: range) -> None:
        """See `Workshop`."""
        self._metrics.remove_engines(model, replicas)
        give_back_blocks_soon()  # tokenisers were read on many threads, and lie among others

    def published(self, name: str, route: Route[ModelEngine] | None) -> None:
        """See `Workshop`."""
        if route is None:
            self._metrics.remove_model(name)
        self._on_published(name)

    def gone(self, name: str) -> None:
        """See `Workshop`."""
        self._metrics.remove_model(name)
        self._metrics.versions.remove_model(name)

    def slept(self, model: str, why: str) -> None:
        """See `Workshop`."""
        self._metrics.versions.slept(model, why)

    def woken(self, model: str, outcome: str) -> None:
        """See `Workshop`."""
        self._metrics.versions.woken(model, outcome)

    def swapped(self, model: str, outcome: str) -> None:
        """See `Workshop`."""
        self._metrics.versions.swapped(model, outcome)

    def _plan(self, bundle: Bundle, config: ServerConfig) -> EnginePlan:
        plan = self._pinned.get(bundle.manifest.name)
        return plan if plan is not None and config.pin_engines else plan_engine(config, bundle, self._num_models())


def _resident_sizes(model: LoadedModel[ModelEngine]) -> list[int]:
    """Return what each of a model's engines has that has a process, in bytes."""
    readings = [read_process(process_id) for process_id in model.engine.process_ids]
    return [reading.resident_memory_bytes for reading in readings if reading is not None]
