"""How a model and its versions are, told to operators."""

from dragoman.server.core.administration import ModelStatus, Requested, VersionStatus
from dragoman.server.core.ports import ServedVersion
from dragoman.server.repository.model_keeper import ModelReconciler
from dragoman.server.repository.versions import State, Version


def status_of(keeper: ModelReconciler) -> ModelStatus:
    """Return how a model is: versions that lie in its folder, the newest first, then those that do not any more."""
    found, route, asked = keeper.found, keeper.route, keeper.overrides
    served = {} if route is None else {id(route.versions[one.name]): one for one in route.described()}
    known = keeper.loaded.with_files()
    there = [one.name for one in reversed(found.versions)]
    statuses = []
    for name in dict.fromkeys([*there, *(one.found.name for one in known)]):
        ones = sorted((one for one in known if one.found.name == name), key=lambda one: -one.since)
        if name in there and all(one.state is State.RETIRING for one in ones):
            statuses.append(VersionStatus(name))
        statuses += [_version(keeper, one, served.get(id(one.answering))) for one in ones]
    return ModelStatus(
        keeper.name,
        route is not None and route.default.engine.is_ready,
        tuple(statuses),
        keeper.told_problems,
        Requested(
            asked.is_unloaded,
            tuple(sorted(asked.loaded)),
            tuple(sorted(asked.unloaded)),
            asked.pinned or "",
            {label: version or "" for label, version in asked.labels.items()},
        ),
    )


def is_served(keeper: ModelReconciler, name: str, *, is_default: bool = False) -> bool:
    """Return whether requests get a version as it lies in its folder of that name; as the default, if that is asked."""
    route = keeper.route
    if route is None:
        return False
    models = [route.default] if is_default else list(route.versions.values())
    there = [version for found in keeper.found.versions if found.name == name and (version := keeper.loaded.known(found))]
    return any(version.answering in models for version in there)


def is_name_served(keeper: ModelReconciler, name: str) -> bool:
    """Return whether requests get a version of a name, be it one whose files have been replaced."""
    models = [] if keeper.route is None else list(keeper.route.versions.values())
    return any(version.answering in models for version in keeper.loaded.with_files() if version.found.name == name)


def why_refused(keeper: ModelReconciler, name: str) -> str:
    """Return why a version is refused, in a line that names it; empty if it is not."""
    refused = (one for one in keeper.loaded.with_files() if one.found.name == name and one.state is State.REFUSED)
    return next((f"version {one.label or 'of the folder'} is refused: {one.reason}" for one in refused), "")


def _version(keeper: ModelReconciler, version: Version, served: ServedVersion | None) -> VersionStatus:
    outcomes = keeper.outcomes(version)
    return VersionStatus(
        version.label,
        version.content,
        version.state.value,
        version.since,
        "" if version.cause is None else version.cause.value,
        version.reason,
        () if served is None else served.labels,
        0.0 if served is None else served.share,
        served is not None and served.is_default,
        outcomes.num_answered,
        outcomes.num_failed,
    )
