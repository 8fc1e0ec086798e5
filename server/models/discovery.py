"""Models and versions found in the models folder, without opening them."""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.fields import listed, one_line, shown, tellable
from dragoman.export.manifest import check_name
from dragoman.export.manifest_file import MAX_MANIFEST_BYTES
from dragoman.model.files import read_bounded
from dragoman.server.config import ConfigError
from dragoman.server.models.model_file import MODEL_FILE, ModelFile, read_model_file
from dragoman.server.models.version_names import check_version_name, natural_key

Stamp = tuple[int, int, int]
"""Inode, size and time of modification of a file in ns: others where another file has taken its place."""

UNREAD: Stamp = (-1, -1, -1)
"""Of no file: what has it is read at the next look."""


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """A folder with a whole `bundle.json`.

    Attributes:
        name: The folder's; empty where the model's folder is itself the bundle.
        directory: Of the bundle.
        stamp: Of its `bundle.json`; another one, too, once it can be read.
        model: Name in its manifest, which a bundle in a model's folder must share with that; empty if there was no telling.
        is_closed: Whether the folder may not be entered, so that opening the bundle is sure to fail.
    """

    name: str
    directory: Path
    stamp: Stamp
    model: str = ""
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class FileLook:
    """How far a `model.toml` is known.

    Attributes:
        used: Stamp of the one in use; None where there is none.
        seen: Stamp of the one that was there at the last look.
        is_usable: Whether one that could be used was there ever, or none at all.
        refused: Stamp of the one that was read and cannot be used; None if there is none.
    """

    used: Stamp | None = None
    seen: Stamp | None = None
    is_usable: bool = True
    refused: Stamp | None = None


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of the folder.

    Attributes:
        name: The folder's, or the manifest's where the folder is itself a bundle; no two models have the same.
        directory: That holds its versions, or is its bundle.
        versions: In natural order of their names, the newest last. While there is a problem, those from before it.
        file: Its `model.toml`, or the last one that could be used.
        problem: Why nothing can be told of what the folder holds; empty if all is well.
        file_problem: Why the `model.toml` that is there is not in use, a line a reason; empty if it is. A model that has never had
            a usable one has no versions.
        left_out: What lies in the folder and is no version, a line each with the reason.
        look: For the next look.
    """

    name: str
    directory: Path
    versions: tuple[FoundVersion, ...] = ()
    file: ModelFile = field(default_factory=ModelFile)
    problem: str = ""
    file_problem: str = ""
    left_out: tuple[str, ...] = ()
    look: FileLook = FileLook()


@dataclass(slots=True)
class Listing:
    """Names in a folder, hidden ones aside.

    Attributes:
        names: All.
        folders: Those of folders, links to folders among them.
        links: Those of links.
    """

    names: set[str]
    folders: list[str]
    links: set[str]


def list_folder(directory: Path) -> Listing:
    """Return what a folder holds.

    Raises:
        OSError: If it cannot be read.
    """
    listing = Listing(set(), [], set())
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            listing.names.add(entry.name)
            if entry.is_symlink():
                listing.links.add(entry.name)
            try:
                if entry.is_dir():
                    listing.folders.append(entry.name)
            except OSError:
                # Such as a link that leads in a circle, or whose target may not be looked at.
                continue
    return listing


def find_beside(directory: Path, name: str, listing: Listing) -> str | None:
    """Return where a link leads if that is a folder beside it, or one that it lies in itself; None for anywhere else."""
    here, there = os.path.realpath(directory), os.path.realpath(directory / name)
    if os.path.dirname(there) == here and os.path.basename(there) in listing.names:
        return os.path.basename(there)
    return there if os.path.commonpath((here, there)) == there else None


def find_versions(directory: Path, listing: Listing, known: dict[str, FoundVersion]) -> tuple[list[FoundVersion], list[str]]:
    """Return the versions in a model's folder in their order, and the reasons why others are none."""
    versions, left_out = [], []
    for name in listing.folders:
        version, reason = find_bundle(directory, name, known.get(name))
        if version is not None and name in listing.links and (target := find_beside(directory, name, listing)) is not None:
            version, reason = None, f"{directory / name}: a link to {target}, which is looked at itself; a label can name a version"
        if version is not None and (refusal := _refuse_name(directory, name)):
            version, reason = None, refusal
        if version is not None:
            versions.append(version)
        if reason:
            left_out.append(reason)
    return sorted(versions, key=lambda version: natural_key(version.name)), sorted(left_out)


def _refuse_name(directory: Path, name: str) -> str:
    try:
        check_version_name(name)
    except ValueError as error:
        return f"{directory}: {error}"
    return ""


def find_bundle(parent: Path, name: str, known: FoundVersion | None) -> tuple[FoundVersion | None, str]:
    """Return the bundle in a folder, and what is odd about it; neither if there is none.

    Args:
        parent: The model's folder.
        name: Of the version's in it; empty for the model's folder itself.
        known: What was found there at the last look.
    """
    # Strings, since this is done for every version every time.
    directory = os.path.join(parent, name) if name else os.fspath(parent)
    location = f"{directory}/{MANIFEST_FILE}"
    try:
        status = os.stat(location)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None, f"{location}: {error.strerror}"
        # Somebody has forgotten rights, which opening it will say. One that is being served is the same as far as anybody can tell.
        return known or _closed(directory, name), ""
    stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
    if known is not None and known.stamp == stamp:
        return known, ""
    try:
        model = _model_name(read_bounded(Path(location), MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        return None, ""
    except msgspec.DecodeError as error:
        return known, f"{location}: is not complete: {one_line(str(error))}"
    except OSError:
        return FoundVersion(name, Path(directory), (*stamp[:2], -1)), ""
    except RecursionError:
        model = ""
    return FoundVersion(name, Path(directory), stamp, model), ""


def _closed(directory: str, name: str) -> FoundVersion | None:
    """Return a version whose folder may not be entered; None if it has vanished."""
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return FoundVersion(name, Path(directory), (status.st_ino, status.st_size, -1), is_closed=True)


def _model_name(content: bytes) -> str:
    """Return the model's name in a manifest; empty if a model cannot be called so.

    Raises:
        msgspec.DecodeError: If it is not whole.
    """
    fields = msgspec.json.decode(content)
    name = fields.get("name") if isinstance(fields, dict) else None
    try:
        check_name(name if isinstance(name, str) else "")
    except ValueError:
        return ""
    return str(name)


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
    problem = _refuse_model_name(directory, name)
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
    return None if _refuse_model_name(directory, directory.name) else FoundModel(directory.name, directory, problem=problem)


def _refuse_model_name(directory: Path, name: str) -> str:
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


def find_models(folder: Path, files: Path | None = None) -> list[FoundModel]:
    """Return the models of a folder, sorted by name; nothing is opened yet.

    Args:
        folder: Of models, or a bundle itself.
        files: Of files that take the place of `model.toml`; see `scan`.

    Raises:
        BundleError: If there is none, or what one is cannot be told.
        ConfigError: If a `model.toml` cannot be used.
    """
    found = scan(folder, files=files)
    if problems := [model.problem for model in found if model.problem]:
        raise BundleError("\n".join(problems))
    refuse_damaged_files(found)
    if not any(model.versions for model in found):
        reasons = [reason for model in found for reason in model.left_out]
        made = next((path.parent for path in (folder / "config.json", *folder.glob("*/config.json")) if path.is_file()), None)
        hint = (
            f"; {made} is a checkpoint, of which `dragoman export`, or `dragoman import --export`, makes a bundle" if made else ""
        )
        raise BundleError("\n".join(reasons) or f"{folder}: holds no bundle (a directory with {MANIFEST_FILE}){hint}")
    return found
