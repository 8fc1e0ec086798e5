"""The folder of models as it has to be for a server to start."""

from pathlib import Path

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.server.repository.found import FoundModel
from dragoman.server.repository.layout import refuse_damaged_files, scan


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
