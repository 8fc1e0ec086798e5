"""Which bundles lie in a store, by the paths that it lists: one, or those of a folder of models."""

from collections.abc import Collection
from dataclasses import dataclass

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.fields import MAX_PATH_CHARACTERS, one_line
from dragoman.export.manifest import check_name
from dragoman.server.repository.version_names import check_version_name, natural_key

MODEL_FILE = "model.toml"


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
        if not self.folder.isprintable():
            raise BundleError(f"{one_line(place)}: no folder of bundles is called so")
        if not self.version:
            return
        try:
            check_name(self.model)
            check_version_name(self.version)
        except ValueError as error:
            raise BundleError(f"{place}: {error}") from error


def find(paths: Collection[str], address: str) -> list[Found]:
    """Return the bundles, in natural order; what is hidden or lies deeper is left alone.

    Args:
        paths: Of files, relative to the address.
        address: For messages.

    Raises:
        BundleError: If there is none, or one at the address itself and others below it.
    """
    found = []
    for path in paths:
        *parts, name = path.split("/")
        if name != MANIFEST_FILE or any(not part or part.startswith(".") for part in parts):
            continue
        if len(parts) == 1:
            found.append(Found(parts[0]))
        elif len(parts) == 2:
            found.append(Found("/".join(parts), *parts))
    if MANIFEST_FILE in paths and found:
        raise BundleError(f"{address}: holds {MANIFEST_FILE} beside folders of bundles; only one of the two can be meant")
    if MANIFEST_FILE in paths:
        found = [Found("")]
    if not found:
        raise BundleError(f"{address}: holds no bundle")
    return sorted(found, key=lambda each: natural_key(each.folder[:MAX_PATH_CHARACTERS]))


def find_model_files(paths: Collection[str]) -> dict[str, str]:
    """Return the path of each model's `model.toml`, by the model."""
    split = (path.split("/") for path in paths)
    return {parts[0]: "/".join(parts) for parts in split if parts[1:] == [MODEL_FILE] and parts[0][:1] not in ("", ".")}
