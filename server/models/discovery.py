"""Scan of the models folder: models, versions and `model.toml` files, without opening bundles.

Entries that cannot be read keep the state of the last scan; only changed files are read again.
"""

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.fields import listed, one_line, shown, tellable
from dragoman.export.manifest import MAX_MANIFEST_BYTES, check_name
from dragoman.model.files import read_bounded
from dragoman.server.config import ConfigError
from dragoman.server.models.model_file import MODEL_FILE, ModelFile, check_version_name, natural_key, read_model_file
from dragoman.server.service.glossaries import FOLDER, Glossaries

# Inode, size and mtime in ns: detects a replaced file.
Stamp = tuple[int, int, int]

# Matches no file, so that the file is read at the next scan.
UNREAD: Stamp = (-1, -1, -1)


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """A folder with a complete `bundle.json`."""

    name: str  # empty where the model's folder is itself the bundle
    directory: Path
    stamp: Stamp  # stamp of `bundle.json`
    model: str = ""  # model name in the manifest; empty if it could not be read
    is_closed: bool = False  # whether the folder's permissions forbid reading the manifest


@dataclass(frozen=True, slots=True)
class FileState:
    """State of a model's `model.toml` between scans."""

    used: Stamp | None = None  # stamp of the file in use; None for none
    seen: Stamp | None = None  # stamp of the file at the last scan
    is_usable: bool = True  # False if no usable file has been read since the model was found
    refused: Stamp | None = None  # stamp of an invalid file; None for none


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of the folder."""

    name: str  # unique name: the folder's, or the manifest's where the folder is itself a bundle
    directory: Path
    versions: tuple[FoundVersion, ...] = ()  # in natural order, the newest last; with a problem, those of the last scan
    file: ModelFile = field(default_factory=ModelFile)  # its `model.toml`, or the last usable one
    problem: str = ""  # reason why the folder cannot be used; empty if it can
    file_problem: str = ""  # reasons, a line each, why the present `model.toml` is not in use
    left_out: tuple[str, ...] = ()  # entries that are not versions, a line each with the reason
    file_state: FileState = FileState()  # state of `model.toml`, for the next scan
    glossaries: tuple[str, ...] = ()  # names of its glossaries


@dataclass(slots=True)
class Listing:
    """Names in a folder, without hidden entries: all, folders (links to folders included), and links."""

    names: set[str]
    folders: list[str]
    links: set[str]


def list_folder(directory: Path) -> Listing:
    """Return the entries of a folder; raise `OSError` if it cannot be read."""
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
            except OSError:  # such as a link that leads in a circle
                continue
    return listing


def find_beside(directory: Path, name: str, listing: Listing) -> str | None:
    """Return a link's target if it is a sibling folder or an ancestor; None otherwise."""
    here, there = os.path.realpath(directory), os.path.realpath(directory / name)
    if os.path.dirname(there) == here and os.path.basename(there) in listing.names:
        return os.path.basename(there)
    return there if os.path.commonpath((here, there)) == there else None


def find_versions(directory: Path, listing: Listing, known: dict[str, FoundVersion]) -> tuple[list[FoundVersion], list[str]]:
    """Return the versions of a model's folder in natural order, and the reasons why other entries are not versions."""
    versions, left_out = [], []
    for name in listing.folders:
        version, reason = find_bundle(directory, name, known.get(name))
        if version is not None and name in listing.links and (target := find_beside(directory, name, listing)) is not None:
            version, reason = None, f"{directory / name}: a link to {target}, which is looked at itself; a label can name a version"
        if version is not None and (refusal := _refuse_name(directory, name, check_version_name)):
            version, reason = None, refusal
        if version is not None:
            versions.append(version)
        if reason:
            left_out.append(reason)
    return sorted(versions, key=lambda version: natural_key(version.name)), sorted(left_out)


def find_bundle(parent: Path, name: str, known: FoundVersion | None) -> tuple[FoundVersion | None, str]:
    """Return the bundle in the subfolder `name` (empty for `parent` itself) and its problem; neither if there is no bundle."""
    # Strings, not paths: this runs for every version in every scan.
    directory = os.path.join(parent, name) if name else os.fspath(parent)
    location = f"{directory}/{MANIFEST_FILE}"
    try:
        status = os.stat(location)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None, f"{location}: {error.strerror}"
        # Opening the bundle reports missing permissions; a known version counts as unchanged.
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
    """Return a version whose manifest cannot be accessed; None if the folder has vanished."""
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return FoundVersion(name, Path(directory), (status.st_ino, status.st_size, -1), is_closed=True)


def _model_name(content: bytes) -> str:
    """Return the model name of a manifest, empty if invalid; raise `msgspec.DecodeError` if the file is incomplete."""
    fields = msgspec.json.decode(content)
    name = fields.get("name") if isinstance(fields, dict) else None
    try:
        check_name(name if isinstance(name, str) else "")
    except ValueError:
        return ""
    return str(name)


FILE_SUFFIX = ".toml"


def scan(folder: Path, before: Sequence[FoundModel] = (), is_at_once: bool = True, files: Path | None = None) -> list[FoundModel]:
    """Return the models of a folder, or of a bundle itself, sorted by name.

    A changed `model.toml` may be half written: it is used if `is_at_once`, otherwise once two scans have found the same file.
    `NAME.toml` in the folder `files` replaces the `model.toml` of that model.

    Raises:
        BundleError: If one of the folders cannot be read.
    """
    known = {model.directory: model for model in before}
    listing = _list(folder)
    if files is not None:
        _list(files)  # without this check all models would fall back on their own files
    if MANIFEST_FILE in listing.names:
        model = _find_model(folder, known.get(folder), is_at_once, files)
        return [] if model is None else [_describable(model)]
    found: list[FoundModel] = []
    links: list[FoundModel] = []
    for name in sorted(listing.folders):
        directory = folder / name
        if (model := _find_model(directory, known.get(directory), is_at_once, files)) is None:
            continue
        if name in listing.links and (target := find_beside(folder, name, listing)) is not None:
            links.append(FoundModel(name, directory, problem=f"{directory}: a link to {target}, which is looked at itself"))
        else:
            found.append(model)
    found = _each_once(found, known)
    names = {model.name for model in found}
    found += [link for link in links if link.name not in names]
    return sorted(map(_describable, found), key=lambda model: model.name)


def _describable(model: FoundModel) -> FoundModel:
    """Return a model with texts that messages can encode; file names may contain undecodable bytes."""
    name, problem, file_problem, *left_out = map(tellable, (model.name, model.problem, model.file_problem, *model.left_out))
    return replace(model, name=name, problem=problem, file_problem=file_problem, left_out=tuple(left_out))


def find_unused(files: Path, models: Iterable[FoundModel]) -> list[str]:
    """Return the entries of `files` that belong to no model; raise `BundleError` if the folder cannot be read."""
    return sorted(_list(files).names - {f"{model.name}{FILE_SUFFIX}" for model in models})


def refuse_damaged_files(models: Iterable[FoundModel]) -> None:
    """Raise `ConfigError` if a `model.toml` is invalid: a line for each reason, with the file and the field."""
    if problems := [model.file_problem for model in models if model.file_problem]:
        raise ConfigError("\n".join(problems))


def _find_model(directory: Path, before: FoundModel | None, is_at_once: bool, files: Path | None) -> FoundModel | None:
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
    file, file_problem, state = _find_file(place_of_file(directory, name, files), before, is_at_once)
    found = tuple(versions) if state.is_usable else ()
    glossaries = tuple(Glossaries(directory / FOLDER).names()) if FOLDER in listing.names else ()
    return FoundModel(name, directory, found, file, problem, file_problem, (*filter(None, [reason]), *left_out), state, glossaries)


def _unreadable(directory: Path, before: FoundModel | None, problem: str) -> FoundModel | None:
    """Return a model with this problem; None for an unknown folder whose name no model can have, such as `lost+found`."""
    if before is not None:
        return replace(before, problem=problem)
    return None if _refuse_name(directory, directory.name) else FoundModel(directory.name, directory, problem=problem)


def _refuse_name(directory: Path, name: str, check: Callable[[str], object] = check_name) -> str:
    try:
        check(name)
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
    """Return the path of a model's file, which need not exist; `files` is as in `scan`."""
    if files is not None and os.path.lexists(path := files / f"{name}{FILE_SUFFIX}"):
        return path
    return directory / MODEL_FILE


def _find_file(path: Path, before: FoundModel | None, is_at_once: bool) -> tuple[ModelFile, str, FileState]:
    """Return the file to use, the problem of the present one, and its state."""
    last = before.file_state if before is not None else FileState()
    file = before.file if before is not None else ModelFile()
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        stamp: Stamp | None = None
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}"
        return file, problem, FileState(UNREAD, UNREAD, before is not None and last.is_usable)
    else:
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
    if before is not None and (stamp == last.used or (stamp is not None and stamp == last.refused and not is_at_once)):
        return file, before.file_problem, replace(last, seen=stamp)
    if before is not None and not is_at_once and stamp != last.seen:
        return file, before.file_problem, replace(last, seen=stamp)
    if stamp is None:
        return ModelFile(), "", FileState()
    try:
        return read_model_file(path), "", FileState(stamp, stamp)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return ModelFile(), "", FileState()
        refused = None if isinstance(error.__cause__, OSError) else stamp  # permissions may change without the file
        return file, str(error), FileState(UNREAD, stamp, before is not None and last.is_usable, refused)


def _each_once(models: list[FoundModel], known: Mapping[Path, FoundModel]) -> list[FoundModel]:
    """Return one model for each name; of duplicates the previously known one keeps its versions, with a problem."""
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
    """Return the models at server start.

    Raises:
        BundleError: If a folder cannot be used, or there is no version.
        ConfigError: If a `model.toml` is invalid.
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
