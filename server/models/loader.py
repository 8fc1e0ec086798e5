"""Loading of a version with the server's and the model's settings: open, estimate memory, start, self-test."""

import asyncio
from collections.abc import Callable, Mapping
from typing import cast
from weakref import WeakKeyDictionary

import structlog
from msgspec import structs

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.signing import Keys, SignatureError
from dragoman.model.errors import InputError
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.engine.settings import slots_per_request
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.loaded import LoadedModel, SleepingEngine
from dragoman.server.models.memory import Measured, max_engines, needed_bytes
from dragoman.server.models.model_file import ModelFile, Traits
from dragoman.server.models.self_test import PROOF_SECONDS, ProofFailed, prove
from dragoman.server.models.version import Cause, Opened, Refused
from dragoman.server.service.glossaries import FOLDER
from dragoman.server.service.languages import PromptTemplates
from dragoman.server.system import read_process, trim_memory_soon
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.workers.engines import EnginePlan, engine_settings, make_engine, measure_engines, plan_engine
from dragoman.server.workers.pool import ReplicaPool

log = structlog.get_logger("dragoman.repository")


class VersionLoader:
    """Opens versions, creates their engines and self-tests them; `turn` is held during a load, so that memory can be estimated."""

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics,
        keys: Keys | None,
        *,
        num_models: Callable[[], int],
        on_change: Callable[[str], None],
    ) -> None:
        """Store the settings; `keys` None accepts unsigned bundles, `on_change` gets the name of a model with changed readiness."""
        self.turn = asyncio.Lock()
        self.load_seconds = config.load_timeout_seconds
        self.metrics = metrics
        self._config, self._keys, self._num_models, self._on_change = config, keys, num_models, on_change
        self._pinned: Mapping[str, EnginePlan] = {}
        self._measured: dict[str, Measured] = {}
        self._plans: WeakKeyDictionary[Bundle, EnginePlan | None] = WeakKeyDictionary()

    def pin(self, plans: Mapping[str, EnginePlan]) -> None:
        """Keep the cores assigned to the initial models for all of their versions."""
        self._pinned = plans

    def open(self, model: str, found: FoundVersion, file: ModelFile) -> Opened:
        """Open and check a version without running it; callable on any thread; raise `Refused` if it cannot be served."""
        try:
            bundle = Bundle.open(found.directory, keys=self._keys)
            if bundle.manifest.name != model:
                raise BundleError(f"{found.directory}: is of model {bundle.manifest.name!r}, not of {model!r}")
            opened = Opened(bundle, bundle.tokenizers(), PromptTemplates(bundle.manifest))
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

    async def measure_engines(self, bundle: Bundle, file: ModelFile, free_bytes: int) -> None:
        """Find out the fastest plan of a version's engines, unless settings say it."""
        config = file.settings.within(self._config)
        most = max_engines(bundle, config.max_slots, free_bytes)
        if most and bundle not in self._plans:  # otherwise others are to be unloaded first, and it is measured another time
            self._plans[bundle] = await measure_engines(config, bundle, self._num_models(), most)

    def num_replicas(self, bundle: Bundle, file: ModelFile) -> int:
        """Return the number of engines of a version."""
        return self._plan(bundle, file.settings.within(self._config)).num_replicas

    def needed_bytes(self, bundle: Bundle, file: ModelFile) -> int:
        """Return the CPU memory that a version's engines may take; GPU memory is checked by the engine."""
        config = file.settings.within(self._config)
        plan, measured = self._plan(bundle, config), self._measured.get(bundle.manifest.name)
        return needed_bytes(bundle, engine_settings(config, bundle, plan)[0], plan.num_replicas, measured)

    def measure(self, model: LoadedModel) -> None:
        """Measure the memory of a running version, to refine the estimate for the model's other versions."""
        if sizes := _resident_sizes(model):
            most = needed_bytes(model.bundle, model.engine.settings, len(sizes))
            self._measured[model.name] = Measured(sum(sizes), most, len(sizes))

    def resident_bytes(self, model: LoadedModel) -> int:
        """Return the resident memory of a version's engines; 0 if unknown."""
        return sum(_resident_sizes(model))

    def sleeping(self, opened: Opened, file: ModelFile, label: str, device: str) -> LoadedModel:
        """Return the stand-in for an unloaded version; raise `ConfigError` if the model's settings are no longer valid."""
        config, bundle = file.settings.within(self._config), opened.bundle
        plan = self._plan(bundle, config)
        engine = SleepingEngine(bundle.manifest.name, engine_settings(config, bundle, plan)[0], plan.num_replicas, device)
        return LoadedModel(bundle, opened.tokenizers, opened.templates, engine, label, traits=_traits(bundle, file, label))

    def make(
        self,
        opened: Opened,
        file: ModelFile,
        label: str,
        replicas: range,
        *,
        on_death: Callable[[], None] = lambda: None,
        is_observed: Callable[[], bool] = lambda: True,
    ) -> LoadedModel:
        """Return a version with an engine that is not started.

        `replicas` are engine numbers for metrics, none for a stand-in. `on_death` is called when an engine has exited unexpectedly,
        `is_observed` returns whether metrics count the work.
        """
        config, bundle = file.settings.within(self._config), opened.bundle
        name = bundle.manifest.name
        self.metrics.add_engines(name, replicas)
        engine = make_engine(
            config,
            bundle,
            self._plan(bundle, config),
            self.metrics,
            on_change=lambda: self._on_change(name),
            on_death=on_death,
            is_observed=is_observed,
            first_replica=replicas.start,
        )
        return LoadedModel(bundle, opened.tokenizers, opened.templates, engine, label, traits=_traits(bundle, file, label))

    async def prove(self, model: LoadedModel) -> None:
        """Self-test a running engine; raise `Refused` if it does not reproduce the sample answers."""
        ready = model.engine.ready
        if ready is None:
            raise Refused(Cause.START, "its engine has ended")
        try:
            seconds = max(PROOF_SECONDS, self.load_seconds)  # a model that loads slowly answers slowly
            proof = await prove(model.bundle, model.tokenizers, model.engine, ready.platform, model.device, seconds=seconds)
        except ProofFailed as error:
            raise Refused(Cause.PROOF, str(error)) from error
        if not proof.is_proved:
            log.warning("a bundle without sample answers cannot be proved", model=model.name, version=model.version)

    def forget(self, model: str, replicas: range) -> None:
        """Remove the metrics of engines that have been stopped."""
        self.metrics.remove_engines(model, replicas)
        trim_memory_soon()  # tokenizers are read on many threads, which fragments the heap

    def _plan(self, bundle: Bundle, config: ServerConfig) -> EnginePlan:
        plan = self._pinned.get(bundle.manifest.name)
        if plan is not None and config.pin_engines:
            return plan
        measured = None if config.replicas or config.num_threads else self._plans.get(bundle)
        return plan_engine(config, bundle, self._num_models()) if measured is None else measured


def _resident_sizes(model: LoadedModel) -> list[int]:
    readings = [read_process(process_id) for process_id in engine_of(model).process_ids]
    return [reading.resident_memory_bytes for reading in readings if reading is not None]


def engine_of(model: LoadedModel) -> ReplicaPool | SleepingEngine:
    """Return a model's engine with its type in the supervisor process, where engines are started."""
    return cast(ReplicaPool | SleepingEngine, model.engine)


def check_slots(bundle: Bundle, max_slots: int, max_slots_per_request: int) -> None:
    """Raise `ConfigError` if a model's defaults need more slots than a request may take."""
    name, defaults = bundle.manifest.name, bundle.manifest.defaults
    limit = slots_per_request(max_slots, max_slots_per_request)
    for field in ("num_beams", "num_return_sequences"):
        if (needed := getattr(defaults, field) or 1) > limit:
            setting = "max_slots" if limit == max_slots else "max_slots_per_request"
            raise ConfigError(f"{setting}: requests may take {limit} slots, but {field} of model {name} is {needed} by default")


def _traits(bundle: Bundle, file: ModelFile, label: str) -> Traits:
    """Return the traits of a version's model, whose folder is that of its versions or the bundle itself."""
    folder = bundle.directory.parent if bundle.directory.name == label else bundle.directory
    return structs.replace(file.settings.traits, glossaries=str(folder / FOLDER))
