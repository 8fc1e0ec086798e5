"""What operators mean by the names that they give, and why what they ask for is not so; all read off a model's keeper."""

from dragoman.export.fields import listed, shown
from dragoman.server.errors import InvalidRequest, NotInRepository, NotPossible
from dragoman.server.repository.model_keeper import ModelReconciler
from dragoman.server.repository.policy import Overrides
from dragoman.server.repository.status import why_refused


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
