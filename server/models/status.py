"""Status of models and versions, and resolution of the names operators use."""

from dragoman.export.fields import listed, shown
from dragoman.server.errors import InvalidRequest, NotInRepository, NotPossible
from dragoman.server.models.policy import Overrides
from dragoman.server.models.reconciler import ModelReconciler
from dragoman.server.models.registry import ServedVersion
from dragoman.server.models.version import State, Version
from dragoman.server.service.administration import ModelStatus, Requested, VersionStatus


def version_names_of(keeper: ModelReconciler) -> list[str]:
    """Return what the folders of a model's versions are called, the newest first."""
    return [found.name for found in reversed(keeper.found.versions)]


def is_called(keeper: ModelReconciler, name: str) -> bool:
    """Return whether a version is called so, by its folder or by its content."""
    return name in version_names_of(keeper) or any(name == one.content for one in keeper.loaded.with_files())


def version_meant(keeper: ModelReconciler, asked: str) -> str:
    """Return what the folder of a version is called that an operator names by that, or by what its content gives.

    Raises:
        NotInRepository: If there is none.
        InvalidRequest: If there are several of this content.
    """
    names = version_names_of(keeper)
    if asked in names:
        return asked
    meant = sorted({one.found.name for one in keeper.loaded.with_files() if one.content == asked and one.found.name in names})
    if len(meant) > 1:
        raise InvalidRequest("version", f"{asked} may be {' or '.join(meant)}; ask for one by its name")
    if not meant:
        contents = {one.found.name: one.content for one in keeper.loaded.with_files()}
        raise NotInRepository("version", shown(asked), [name or contents.get(name, "") for name in names])
    return meant[0]


def version_before(keeper: ModelReconciler) -> str:
    """Return the version that answered requests before the one that does.

    Raises:
        NotPossible: If none can.
    """
    asked = keeper.overrides
    usable = [name for name in version_names_of(keeper) if name not in asked.unloaded and not why_refused(keeper, name)]
    if (name := keeper.history.before(usable)) is None:
        names = listed([one for one in usable if one]) or "none"
        raise NotPossible(f"version: none that answered before is there; name one of {names}")
    return name


def stands_for(keeper: ModelReconciler, label: str, name: str | None) -> bool:
    """Return whether requests can name a version by a label; with None whether any version."""
    labels = {} if keeper.route is None else keeper.route.labels
    return label in labels and name in (None, labels[label])


def check_loaded(keeper: ModelReconciler) -> None:
    """Do nothing if a model is to be served.

    Raises:
        NotPossible: If an operator has unloaded it.
    """
    if keeper.overrides.is_unloaded:
        raise NotPossible(f"model: {keeper.name} is unloaded; load it first")


def why_not_served(keeper: ModelReconciler, asked: Overrides) -> str:
    """Return why something that is asked for is not served."""
    found = keeper.found
    problems = (found.problem, found.file_problem, *keeper.would_want(asked).problems)
    reasons = [why_refused(keeper, one.name) for one in reversed(found.versions)]
    told = "; ".join(dict.fromkeys(filter(None, (*reasons, *problems))))
    return told or ("the log says why" if found.versions else "its folder holds no version")


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
