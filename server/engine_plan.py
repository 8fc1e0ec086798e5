"""How many engines each model gets, of how many threads, and on which cores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dragoman.export.bundle import Bundle
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.cores import TooFewCores, available_cores, divide_cores

USUAL_THREADS = 4
"""About so many an engine, where we choose: steps take milliseconds or less, and more threads spend them waiting for each other."""
CPU_PRECISIONS = ("fp32", "int8")
"""Of bundles that never run on a GPU, see `runtime/providers.py`."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines of one model.

    Attributes:
        num_threads: Of each.
        cores: That each keeps to, one entry an engine; none for all cores.
    """

    num_threads: int
    cores: tuple[tuple[int, ...], ...]

    @property
    def num_replicas(self) -> int:
        """Engines."""
        return len(self.cores)


def plan_engine(config: ServerConfig, bundle: Bundle, num_models: int) -> EnginePlan:
    """Return the engines of one model among others, on whichever cores.

    Args:
        config: The settings that it has.
        bundle: Of the model.
        num_models: That share the machine.

    Raises:
        ConfigError: If it cannot have so many.
    """
    num_replicas, num_threads = _size(config, bundle, _part_of_cores(num_models))
    return EnginePlan(num_threads, ((),) * num_replicas)


def plan_engines(
    config: ServerConfig, bundles: Sequence[Bundle], own: Mapping[str, ServerConfig] = MappingProxyType({})
) -> dict[str, EnginePlan]:
    """Return the engines of each model, by name.

    Args:
        config: The server's settings.
        bundles: A version of each model.
        own: The settings of models that have some of their own, by name.

    Raises:
        ConfigError: If a model cannot have so many, or there are too few cores to pin them to.
    """
    num_cores = _part_of_cores(len(bundles))
    names = [bundle.manifest.name for bundle in bundles]
    sizes = {name: _size(own.get(name, config), bundle, num_cores) for name, bundle in zip(names, bundles, strict=True)}
    cores: list[tuple[int, ...]] = [()] * sum(num_replicas for num_replicas, _ in sizes.values())
    if config.pin_engines:
        try:
            cores = divide_cores(len(cores), config.num_threads)
        except TooFewCores as error:
            raise ConfigError(f"pin_engines: {error}") from error
    plans: dict[str, EnginePlan] = {}
    for name, (num_replicas, num_threads) in sizes.items():
        plans[name] = EnginePlan(num_threads, tuple(cores[:num_replicas]))
        cores = cores[num_replicas:]
    return plans


def _part_of_cores(num_models: int) -> int:
    return max(1, available_cores() // max(1, num_models))


def choose_replicas(num_cores: int) -> tuple[int, int]:
    """Return how many engines a model gets on the CPU, and of how many threads each, where no setting says so.

    Args:
        num_cores: For the model.
    """
    num_replicas = max(1, round(num_cores / USUAL_THREADS))
    return num_replicas, num_cores // num_replicas


def _size(config: ServerConfig, bundle: Bundle, num_cores: int) -> tuple[int, int]:
    """Return the engines of a model, and the threads of each."""
    may_be_on_gpu = config.device != "cpu" and bundle.manifest.precision not in CPU_PRECISIONS
    if config.replicas > 1 and may_be_on_gpu:
        name, precision = bundle.manifest.name, bundle.manifest.precision
        raise ConfigError(
            f"replicas: model {name} ({precision}) may run on a GPU, which one engine fills; set device to cpu, or replicas to 1"
        )
    if config.replicas or config.num_threads:
        num_replicas = config.replicas or 1
        return num_replicas, config.num_threads or max(1, num_cores // num_replicas)
    if may_be_on_gpu:
        return 1, num_cores
    return choose_replicas(num_cores)
