"""`model.toml` of each model, from a store: it comes with the versions, unless somebody has written one of their own here."""

import hashlib
from pathlib import Path
from typing import Final

from dragoman.export.bundle import BundleError
from dragoman.export.signing import MAX_SIGNATURE_BYTES, SIGNATURE_SUFFIX, Keys
from dragoman.model.files import read_bounded as read_file
from dragoman.model.files import replaced
from dragoman.server.stores.found import MODEL_FILE
from dragoman.server.stores.placing import Place, sync_folder
from dragoman.server.stores.store import NotThereError, Store, named, read_bounded

MAX_MODEL_FILE_BYTES: Final = 1 << 16
MARK_FILE: Final = ".model.toml.pulled"
"""Holds the SHA-256 of the file that was pulled, and of the one before it: one that has another was written here."""

_DIGEST_CHARACTERS: Final = 64


def pull_model_file(store: Store, path: str, place: Place, model: str, keys: Keys | None) -> bool:
    """Bring a model's file here.

    Args:
        store: Where it lies.
        path: As the store has it.
        place: Where bundles are pulled into.
        model: Whose file it is; its folder is there.
        keys: Of which one must have signed it; None if it need not be signed.

    Returns:
        Whether it is another than before.

    Raises:
        BundleError: If it is not signed as it must be, or one that was written here is in its place.
        StoreError: If it cannot be had.
        OSError: If it cannot be written.
    """
    name = named(store, path)
    content = read_bounded(store, path, MAX_MODEL_FILE_BYTES)
    if keys is not None:
        try:
            signature = read_bounded(store, path + SIGNATURE_SUFFIX, MAX_SIGNATURE_BYTES)
        except NotThereError:
            raise BundleError(f"{name}: is not signed (there is no {MODEL_FILE}{SIGNATURE_SUFFIX}), and must be") from None
        keys.check(content, signature, name)
    with place.locked():
        return _put(content, place.folder / model)


def _put(content: bytes, folder: Path) -> bool:
    """Write a model's file if it is another; whoever is killed between the two leaves a mark that knows the file from before."""
    target, known = folder / MODEL_FILE, [_digest(content)]
    if target.exists():
        there = read_file(target, MAX_MODEL_FILE_BYTES)
        if there == content:
            return False
        if not is_pulled(folder):
            raise BundleError(f"{target}: was written here, and stays; the store has another")
        known.append(_digest(there))
    for file, written in ((folder / MARK_FILE, "\n".join(known).encode()), (target, content)):
        with replaced(file) as temporary:
            temporary.write_bytes(written)
            sync_folder(temporary)
    sync_folder(folder)
    return True


def is_pulled(folder: Path) -> bool:
    """Tell whether a model's file is one that was pulled."""
    try:
        marked = read_file(folder / MARK_FILE, 2 * _DIGEST_CHARACTERS + 1).decode("ascii").split("\n")
        return _digest(read_file(folder / MODEL_FILE, MAX_MODEL_FILE_BYTES)) in marked
    except (OSError, UnicodeDecodeError):
        return False


def remove_model_file(folder: Path) -> bool:
    """Take a model's file away if it was pulled; return whether it was."""
    if not is_pulled(folder):
        return False
    (folder / MODEL_FILE).unlink(missing_ok=True)
    (folder / MARK_FILE).unlink(missing_ok=True)
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
