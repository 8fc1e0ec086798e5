"""What lies in the folder of models, seen without opening it: models, their versions, their `model.toml`.

Nothing here is checked against its checksums, and nothing is refused that opening a bundle refuses with a better reason. What
cannot be told now, because of rights or of a half of a file, is as it was at the last look. A look reads what has changed since
the one before, so it can be repeated every few seconds.
"""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.fields import listed, shown, tellable
from dragoman.export.manifest import check_name
from dragoman.server.config import ConfigError
from dragoman.server.repository.folders import Listing, find_beside, find_bundle, find_versions, list_folder
from dragoman.server.repository.found import UNREAD, FileLook, Stamp
from dragoman.server.repository.found import FoundModel as FoundModel
from dragoman.server.repository.found import FoundVersion as FoundVersion
from dragoman.server.repository.model_file import MODEL_FILE, ModelFile, read_model_file

FILE_SUFFIX = ".toml"


def scan(folder: Path, before: Sequence[FoundModel] = (), is_at_once: bool = True, files: Path | None = None) -> list[FoundModel]:
    """Return the models of a folder, sorted by name; none if it is empty.

    Args:
        folder: Of models, or a bundle itself.
        before: What the last look found; of what has not changed since, nothing is read again.
        is_at_once: Use a changed `model.toml` although it may be half written; otherwise once two looks have found the same.
        files: Folder in which NAME.toml takes the place of the `model.toml` of the model of that name; None for none.

    Raises:
        BundleError: If there is no such folder, or it cannot be read; the same of `files`.
    """
    known = {model.directory: model for model in before}
    listing = _list(folder)
    if files is not None:
        _list(files)  # without it, all models would fall back on files of their own
    if MANIFEST_FILE in listing.names:
        model = _look(folder, known.get(folder), is_at_once, files)
        return [] if model is None else [_tellable(model)]
    found: list[FoundModel] = []
    links: list[FoundModel] = []
    for name in sorted(listing.folders):
        directory = folder / name
        if (model := _look(directory, known.get(directory), is_at_once, files)) is None:
            continue
        if name in listing.links and (target := find_beside(folder, name, listing)) is not None:
            links.append(FoundModel(name, directory, problem=f"{directory}: a link to {target}, which is looked at itself"))
        else:
            found.append(model)
    found = _each_once(found, known)
    names = {model.name for model in found}
    found += [link for link in links if link.name not in names]
    return sorted(map(_tellable, found), key=lambda model: model.name)


def _tellable(model: FoundModel) -> FoundModel:
    """Return a model with texts that messages can hold, which what file systems call things need not be."""
    name, problem, file_problem, *left_out = map(tellable, (model.name, model.problem, model.file_problem, *model.left_out))
    return replace(model, name=name, problem=problem, file_problem=file_problem, left_out=tuple(left_out))


def find_unused(files: Path, models: Iterable[FoundModel]) -> list[str]:
    """Return the names in a folder of models' files that no model has: misspelt ones, and those of models that are still to come.

    Args:
        files: See `scan`.
        models: That there are.

    Raises:
        BundleError: If the folder cannot be read.
    """
    return sorted(_list(files).names - {f"{model.name}{FILE_SUFFIX}" for model in models})


def refuse_damaged_files(models: Iterable[FoundModel]) -> None:
    """Do nothing if every `model.toml` can be used; for the start, where there is no earlier one to go on with.

    Raises:
        ConfigError: A line for each reason, which names the file and the field.
    """
    if problems := [model.file_problem for model in models if model.file_problem]:
        raise ConfigError("\n".join(problems))


def _look(directory: Path, before: FoundModel | None, is_at_once: bool, files: Path | None) -> FoundModel | None:
    """Return the model of a folder; None if it holds none."""
    try:
        listing = list_folder(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return _unreadable(directory, before, f"{directory}: cannot be read: {error.strerror}")
    known = {version.name: version for version in before.versions} if before is not None else {}
    versions, left_out = find_versions(directory, listing, known)
    flat, reason = find_bundle(directory, "", known.get("")) if MANIFEST_FILE in listing.names else (None, "")
    has_versions = not all(version.is_closed for version in versions)
    if flat is None and not reason and not has_versions and not left_out and MODEL_FILE not in listing.names:
        return None
    is_both = has_versions and MANIFEST_FILE in listing.names
    name = flat.model if flat is not None and flat.model else directory.name
    if before is not None and (is_both or reason or (flat is not None and not flat.model)):
        name = before.name
    problem = _refuse_name(directory, name)
    if is_both and not problem:
        names = listed([version.name for version in versions])
        problem = f"{directory}: holds {MANIFEST_FILE} beside folders of versions ({names}); only one of the two can be meant"
    if flat is not None:
        versions = [flat]
    if problem:
        versions = list(before.versions) if before is not None else []
    file, file_problem, look = _find_file(place_of_file(directory, name, files), before, is_at_once)
    found = tuple(versions) if look.is_usable else ()
    return FoundModel(name, directory, found, file, problem, file_problem, (*filter(None, [reason]), *left_out), look)


def _unreadable(directory: Path, before: FoundModel | None, problem: str) -> FoundModel | None:
    """Return a model that cannot be looked at; None if it may as well be none, as `lost+found` is."""
    if before is not None:
        return replace(before, problem=problem)
    return None if _refuse_name(directory, directory.name) else FoundModel(directory.name, directory, problem=problem)


def _refuse_name(directory: Path, name: str) -> str:
    try:
        check_name(name)
    except ValueError as error:
        return f"{directory}: {error}"
    return ""


def _list(folder: Path) -> Listing:
    try:
        return list_folder(folder)
    except OSError as error:
        reasons = {errno.ENOENT: "no such folder", errno.ENOTDIR: "not a folder"}
        raise BundleError(f"{folder}: {reasons.get(error.errno or 0, error.strerror)}") from error


def place_of_file(directory: Path, name: str, files: Path | None) -> Path:
    """Return where a model's file is, which need not be there.

    Args:
        directory: Of the model.
        name: The model's.
        files: See `scan`.
    """
    if files is not None and os.path.lexists(path := files / f"{name}{FILE_SUFFIX}"):
        return path
    return directory / MODEL_FILE


def _find_file(path: Path, before: FoundModel | None, is_at_once: bool) -> tuple[ModelFile, str, FileLook]:
    """Return a model's file or the one to go on with, why the one that is there is not in use, and how far it is known."""
    last = before.look if before is not None else FileLook()
    file = before.file if before is not None else ModelFile()
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        stamp: Stamp | None = None
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}"
        return file, problem, FileLook(UNREAD, UNREAD, before is not None and last.is_usable)
    else:
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
    if before is not None and (stamp == last.used or (stamp is not None and stamp == last.refused and not is_at_once)):
        return file, before.file_problem, replace(last, seen=stamp)
    if before is not None and not is_at_once and stamp != last.seen:
        return file, before.file_problem, replace(last, seen=stamp)
    if stamp is None:
        return ModelFile(), "", FileLook()
    try:
        return read_model_file(path), "", FileLook(stamp, stamp)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return ModelFile(), "", FileLook()
        refused = None if isinstance(error.__cause__, OSError) else stamp  # rights may change without the file
        return file, str(error), FileLook(UNREAD, stamp, before is not None and last.is_usable, refused)


def _each_once(models: list[FoundModel], known: Mapping[Path, FoundModel]) -> list[FoundModel]:
    """Return the models by name. Of those that have the same, the one from before stays as it was, with a problem."""
    named: dict[str, list[FoundModel]] = {}
    for model in models:
        named.setdefault(model.name, []).append(model)
    found = []
    for name in sorted(named):
        first, *others = named[name]
        if others:
            kept = next((model for model in named[name] if model.directory in known and known[model.directory].name == name), first)
            last = known.get(kept.directory)
            places = listed([str(model.directory) for model in named[name]])
            problem = f"{places}: each holds a model named {shown(name)}"
            first = replace(kept, problem=problem, versions=last.versions if last is not None and last.name == name else ())
        found.append(first)
    return found
