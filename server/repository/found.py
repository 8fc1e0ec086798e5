"""Models and versions as they lie in a folder, before anything of them is opened."""

from dataclasses import dataclass, field
from pathlib import Path

from dragoman.server.repository.model_file import ModelFile

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
