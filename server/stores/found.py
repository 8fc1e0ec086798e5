"""Which bundles lie in a store, by the paths that it lists: one, or those of a folder of models."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.fields import one_line
from dragoman.export.manifest import check_name

MODEL_FILE = "model.toml"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


@dataclass(frozen=True, slots=True)
class Found:
    """A bundle in a store.

    Attributes:
        folder: Its path below the address, empty for the address itself.
        model: Name of the folder of versions that it lies in; empty where it lies in none.
        version: Name of its own folder there; empty likewise.
    """

    folder: str
    model: str = ""
    version: str = ""

    def path(self, file: str) -> str:
        """Return the path of one of its files, as the store has it."""
        return f"{self.folder}/{file}" if self.folder else file

    def check(self, place: str) -> None:
        """Refuse names that no folder of models may have.

        Args:
            place: What messages call it.

        Raises:
            BundleError: If it has one.
        """
        if not self.version:
            return
        try:
            check_name(self.model)
        except ValueError as error:
            raise BundleError(f"{place}: {error}") from error
        if _VERSION.fullmatch(self.version) is None:
            raise BundleError(f"{place}: {one_line(self.version, 80)!r} is not the name of a version")


def find(paths: Collection[str]) -> list[Found]:
    """Return the bundles, in natural order; what is hidden or lies deeper is left alone.

    Args:
        paths: Of files, relative to the address.
    """
    if MANIFEST_FILE in paths:
        return [Found("")]
    found = []
    for path in paths:
        *parts, name = path.split("/")
        if name != MANIFEST_FILE or any(not part or part.startswith(".") for part in parts):
            continue
        if len(parts) == 1:
            found.append(Found(parts[0]))
        elif len(parts) == 2:
            found.append(Found("/".join(parts), *parts))
    return sorted(found, key=lambda each: natural(each.folder))


def find_model_files(paths: Collection[str]) -> dict[str, str]:
    """Return the path of each model's `model.toml`, by the model."""
    split = (path.split("/") for path in paths)
    return {parts[0]: "/".join(parts) for parts in split if parts[1:] == [MODEL_FILE] and parts[0][:1] not in ("", ".")}


def natural(text: str) -> list[tuple[bool, int, str]]:
    """Return a key by which version 10 comes after version 9."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
