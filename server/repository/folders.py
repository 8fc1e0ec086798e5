"""One folder that may hold bundles: what is in it, and which of that is a version."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dragoman.export.bundle import MANIFEST_FILE
from dragoman.export.fields import one_line
from dragoman.export.manifest import check_name
from dragoman.export.manifest_file import MAX_MANIFEST_BYTES
from dragoman.model.files import read_bounded
from dragoman.server.repository.found import FoundVersion
from dragoman.server.repository.version_names import check_version_name, natural_key


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
