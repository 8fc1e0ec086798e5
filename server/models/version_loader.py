"""Settings that only make sense with the models at hand, compared with them."""

from collections.abc import Collection

from dragoman.export.bundle import Bundle
from dragoman.server.config import ConfigError, ReadyRule
from dragoman.server.engine.settings import slots_per_request


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
