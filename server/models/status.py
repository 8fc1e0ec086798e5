"""Status of models and versions, and resolution of the names that operators use."""

from dragoman.export.fields import listed, shown
from dragoman.server.errors import InvalidRequest, NotInRepository, NotPossible
from dragoman.server.models.policy import Overrides
from dragoman.server.models.reconciler import ModelReconciler
from dragoman.server.models.registry import ServedVersion
from dragoman.server.models.version import State, Version
from dragoman.server.service.administration import ModelStatus, Requested, VersionStatus


def version_names_of(model: ModelReconciler) -> list[str]:
    """Return the names of the version folders, the newest first."""
    return [found.name for found in reversed(model.found.versions)]


def is_called(model: ModelReconciler, name: str) -> bool:
    """Return whether a version has this folder name or content hash."""
    return name in version_names_of(model) or any(name == one.content for one in model.loaded.with_files())


def resolve_version(model: ModelReconciler, asked: str) -> str:
    """Return the folder name of a version by folder name or content hash.

    Raises:
        NotInRepository: If there is none.
        InvalidRequest: If there are several with this content.
    """
    names, known = version_names_of(model), model.loaded.with_files()
    if asked in names:
        return asked
    candidates = sorted({one.found.name for one in known if one.content == asked and one.found.name in names})
    if len(candidates) > 1:
        raise InvalidRequest("version", f"{asked} may be {' or '.join(candidates)}; ask for one by its name")
    if not candidates:
        contents = {one.found.name: one.content for one in known}
        raise NotInRepository("version", shown(asked), [name or contents.get(name, "") for name in names])
    return candidates[0]


def version_before(model: ModelReconciler) -> str:
    """Return the default before the present one; raise `NotPossible` if none can be served."""
    usable = [name for name in version_names_of(model) if name not in model.overrides.unloaded and not why_refused(model, name)]
    if (name := model.history.before(usable)) is None:
        names = listed([one for one in usable if one]) or "none"
        raise NotPossible(f"version: none that answered before is there; name one of {names}")
    return name


def stands_for(model: ModelReconciler, label: str, name: str | None) -> bool:
    """Return whether a label is assigned to a version; with None to any version."""
    labels = {} if model.route is None else model.route.labels
    return label in labels and name in (None, labels[label])


def check_loaded(model: ModelReconciler) -> None:
    """Raise `NotPossible` if an operator has unloaded the model."""
    if model.overrides.is_unloaded:
        raise NotPossible(f"model: {model.name} is unloaded; load it first")


def why_not_served(model: ModelReconciler, asked: Overrides) -> str:
    """Return why overrides are not met."""
    found = model.found
    problems = (found.problem, found.file_problem, *model.target(asked).problems)
    reasons = [why_refused(model, one.name) for one in reversed(found.versions)]
    reason = "; ".join(dict.fromkeys(filter(None, (*reasons, *problems))))
    return reason or ("the log says why" if found.versions else "its folder holds no version")


def is_served(model: ModelReconciler, name: str, *, is_default: bool = False) -> bool:
    """Return whether the present version of a name is served; with `is_default`, as the default."""
    if model.route is None:
        return False
    models = [model.route.default] if is_default else list(model.route.versions.values())
    there = [version for found in model.found.versions if found.name == name and (version := model.loaded.known(found))]
    return any(version.answering in models for version in there)


def is_name_served(model: ModelReconciler, name: str) -> bool:
    """Return whether a version of a name is served, including one whose files have been replaced."""
    models = [] if model.route is None else list(model.route.versions.values())
    return any(version.answering in models for version in model.loaded.with_files() if version.found.name == name)


def why_refused(model: ModelReconciler, name: str) -> str:
    """Return why a version is refused, in a line that names it; empty if it is not."""
    refused = (one for one in model.loaded.with_files() if one.found.name == name and one.state is State.REFUSED)
    return next((f"version {one.label or 'of the folder'} is refused: {one.reason}" for one in refused), "")


def status_of(model: ModelReconciler) -> ModelStatus:
    """Return the status of a model: the versions of its folder, the newest first, then removed ones."""
    route, asked, known, there = model.route, model.overrides, model.loaded.with_files(), version_names_of(model)
    served = {} if route is None else {id(route.versions[one.name]): one for one in route.described()}
    statuses = []
    for name in dict.fromkeys([*there, *(one.found.name for one in known)]):
        ones = sorted((one for one in known if one.found.name == name), key=lambda one: -one.since)
        if name in there and all(one.state is State.RETIRING for one in ones):
            statuses.append(VersionStatus(name))
        statuses += [_version_status(model, one, served.get(id(one.answering))) for one in ones]
    return ModelStatus(
        model.name,
        route is not None and route.default.engine.is_ready,
        tuple(statuses),
        model.all_problems,
        Requested(
            asked.is_unloaded,
            tuple(sorted(asked.loaded)),
            tuple(sorted(asked.unloaded)),
            asked.pinned or "",
            {label: version or "" for label, version in asked.labels.items()},
        ),
        model.found.glossaries,
    )


def _version_status(model: ModelReconciler, version: Version, served: ServedVersion | None) -> VersionStatus:
    outcomes, cause = model.outcomes(version), version.cause or ""
    own = (version.label, version.content, version.state.value, version.since, str(cause), version.reason)
    as_served = ((), 0.0, False) if served is None else (served.labels, served.share, served.is_default)
    return VersionStatus(*own, *as_served, outcomes.num_answered, outcomes.num_failed)
