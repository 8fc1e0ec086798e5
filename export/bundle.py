"""The bundle: the directory that export writes and the server reads, compared with its manifest.

The server imports this file, so it imports neither torch nor ONNX. It does not look inside the graphs: the manifest says what they
have, and the checksums say that they are the ones it speaks of. Only those made for CUDA are looked at, see `cuda_contract`.
"""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from dragoman.export.cuda_contract import check_for_cuda
from dragoman.export.fields import BundleError as BundleError
from dragoman.export.manifest import CARD_FILE, PARITY_FILE, parse_manifest, read_manifest_bytes
from dragoman.export.manifest import MANIFEST_FILE as MANIFEST_FILE
from dragoman.export.manifest import TOKENIZER_DIRECTORY as TOKENIZER_DIRECTORY
from dragoman.export.manifest import FileEntry as FileEntry
from dragoman.export.manifest import Manifest as Manifest
from dragoman.export.signing import Keys, check_signed
from dragoman.model.card import MAX_CARD_BYTES
from dragoman.model.files import leads_out, open_regular, read_bounded
from dragoman.model.text.tokenizer import TokenizerError
from dragoman.model.text.tokenizers import Tokenizers

ENCODER_FILE, ENCODER_WEIGHTS_FILE = "encoder.onnx", "encoder.weights"
DECODER_FILE, DECODER_WEIGHTS_FILE = "decoder.onnx", "decoder.weights"
# The scorer reads its weights from the files of the other two graphs; what they lack, and is large, has a file of its own.
SCORER_FILE, SCORER_WEIGHTS_FILE = "scorer.onnx", "scorer.weights"
# Ids of the tokens that a model with a shortlist chooses from.
SHORTLIST_FILE = "shortlist.json"
GRAPH_FILES = ENCODER_FILE, DECODER_FILE, SCORER_FILE
REQUIRED_FILES = (ENCODER_FILE, ENCODER_WEIGHTS_FILE, DECODER_FILE, DECODER_WEIGHTS_FILE, SCORER_FILE)

_CHUNK_BYTES = 1 << 18


class Bundle:
    """A bundle on disk whose files are the ones its manifest lists."""

    def __init__(self, directory: Path, manifest: Manifest, digest: str) -> None:
        """Take what `open` has checked, and the SHA-256 of the bytes that the manifest was read from."""
        self.directory = directory
        self.manifest = manifest
        self.digest = digest

    @classmethod
    def open(cls, directory: Path, is_checked: bool = True, keys: Keys | None = None) -> "Bundle":
        """Read the manifest and compare the directory with it; files that the manifest does not list are ignored.

        The manifest is read once: what a signature is compared with is what is used.

        Args:
            directory: That `export` wrote.
            is_checked: Also read every file and compare its SHA-256. Without it, only presence and size are looked at.
            keys: Of which one must have signed the manifest; None if it need not be signed.

        Raises:
            BundleError: Naming the file and why it is refused; one made for CUDA also if its attention does not run there.
        """
        _check_inside(directory, directory / MANIFEST_FILE)
        content = read_manifest_bytes(directory / MANIFEST_FILE)
        if keys is not None:
            check_signed(directory, content, keys)
        manifest = parse_manifest(content, directory / MANIFEST_FILE)
        for path in (*REQUIRED_FILES, PARITY_FILE):
            if path not in manifest.files:
                raise BundleError(f"{directory / MANIFEST_FILE}: files does not list {path}")
        if not any(path.startswith(f"{TOKENIZER_DIRECTORY}/") for path in manifest.files):
            raise BundleError(f"{directory / MANIFEST_FILE}: files lists nothing in {TOKENIZER_DIRECTORY}/")
        if manifest.num_choices < manifest.target_vocab_size and SHORTLIST_FILE not in manifest.files:
            raise BundleError(f"{directory / MANIFEST_FILE}: files does not list {SHORTLIST_FILE}")
        for path, entry in manifest.files.items():
            _check_file(directory, path, entry, is_checked)
        if not manifest.is_packed:
            for path in GRAPH_FILES:
                check_for_cuda(directory / path)
        return cls(directory, manifest, hashlib.sha256(content).hexdigest())

    @property
    def encoder_path(self) -> Path:
        """The encoder graph; its weights lie beside it."""
        return self.directory / ENCODER_FILE

    @property
    def decoder_path(self) -> Path:
        """The decode-step graph; its weights lie beside it."""
        return self.directory / DECODER_FILE

    @property
    def scorer_path(self) -> Path:
        """The scorer graph; its weights are those of the other two."""
        return self.directory / SCORER_FILE

    def refuse_other(self, digest: str) -> None:
        """Do nothing if this is the bundle whose manifest somebody else has read and checked.

        Args:
            digest: SHA-256 of that manifest; empty for any.

        Raises:
            BundleError: If it is not.
        """
        if digest not in ("", self.digest):
            raise BundleError(f"{self.directory / MANIFEST_FILE}: is not the one that the server started with")

    def check_unchanged(self) -> None:
        """Compare the directory with what was opened, every file of it.

        Raises:
            BundleError: If the bundle is away, or is not the one that was opened.
        """
        found = Bundle.open(self.directory, is_checked=False).manifest
        if found.files != self.manifest.files:
            served = self.manifest.version
            raise BundleError(f"{self.directory}: is now version {found.version}, but {served} is being served")
        Bundle.open(self.directory).refuse_other(self.digest)

    def check_tokenizers(self) -> None:
        """Compare the tokenisers' files with the manifest; for one who has opened the bundle without comparing anything.

        Raises:
            BundleError: Naming the file and why it is refused.
        """
        for path, entry in self.manifest.files.items():
            if path.startswith(f"{TOKENIZER_DIRECTORY}/"):
                _check_file(self.directory, path, entry, is_hashed=True)

    def card(self) -> str:
        """Return the model's card, in Markdown; empty where the manifest lists none, or what lies there is not what it lists."""
        entry = self.manifest.files.get(CARD_FILE)
        if entry is None:
            return ""
        try:
            _check_inside(self.directory, self.directory / CARD_FILE)
            content = read_bounded(self.directory / CARD_FILE, MAX_CARD_BYTES)
        except (BundleError, OSError):
            return ""
        return content.decode(errors="replace") if hashlib.sha256(content).hexdigest() == entry.sha256 else ""

    def tokenizers(self) -> Tokenizers:
        """Load the tokenisers, from files that the manifest lists.

        Raises:
            BundleError: If their files are not tokenisers, or have more tokens than the model.
        """
        directory, prefix = self.directory / TOKENIZER_DIRECTORY, f"{TOKENIZER_DIRECTORY}/"
        listed = {path.removeprefix(prefix) for path in self.manifest.files if path.startswith(prefix)}
        try:
            tokenizers = Tokenizers.load(directory, listed)
        except TokenizerError as error:
            raise BundleError(str(error)) from error
        try:
            tokenizers.refuse_other_sizes(self.manifest.source_vocab_size, self.manifest.target_vocab_size)
        except TokenizerError as error:
            raise BundleError(f"{directory}: {error}") from error
        return tokenizers


def _check_inside(directory: Path, location: Path) -> None:
    """Refuse a link that leads outside the bundle."""
    if leads_out(location, directory):
        raise BundleError(f"{location}: a link that leads outside the bundle")


def _check_file(directory: Path, path: str, entry: FileEntry, is_hashed: bool) -> None:
    """Refuse a file that is not there, leads outside the bundle, or is not the one that was exported."""
    location = directory / path
    _check_inside(directory, location)
    try:
        if not location.is_file():
            raise BundleError(f"{location}: no such file, though {MANIFEST_FILE} lists it")
        with open_regular(location) as file:
            if (size := os.fstat(file.fileno()).st_size) != entry.size:
                raise BundleError(f"{location}: {size} bytes, but {MANIFEST_FILE} says {entry.size}")
            if is_hashed and (digest := _hash(file, size)) != entry.sha256:
                raise BundleError(f"{location}: SHA-256 {digest}, but {MANIFEST_FILE} says {entry.sha256}")
    except OSError as error:
        raise BundleError(f"{location}: {error.strerror}") from error


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return _hash(file, os.fstat(file.fileno()).st_size)


def _hash(file: BinaryIO, size: int) -> str:
    """Return the SHA-256 of a file's first bytes: one that grows meanwhile is not followed for ever."""
    digest = hashlib.sha256()
    while size > 0 and (chunk := file.read(min(size, _CHUNK_BYTES))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()
