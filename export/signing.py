"""Signatures of bundles: Ed25519 over the exact bytes of `bundle.json`, whose checksums cover every other file.

A signature lies beside what it signs, in a small JSON file that names the key by the SHA-256 of its DER form. Keys are PEM files as
openssl writes them. Nothing of what is signed is parsed before its signature is found good.
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from dragoman.export.fields import BundleError, Digest, one_line
from dragoman.export.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES
from dragoman.model.errors import InputError
from dragoman.model.files import read_given, write_text

if TYPE_CHECKING:  # installed where somebody signs or checks signatures
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

SIGNATURE_SUFFIX = ".sig"
SIGNATURE_FILE = MANIFEST_FILE + SIGNATURE_SUFFIX
MAX_SIGNATURE_BYTES = 1 << 12
MAX_KEY_FILE_BYTES = 1 << 16
MAX_KEYS = 1024

_BEGIN, _END = "-----BEGIN ", "-----END "


class SignatureError(BundleError):
    """A required signature is missing or invalid."""


class KeyFileError(InputError):
    """A key, or a folder of keys, that cannot be used; the message names the file."""


class Signature(Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a signature's file."""

    format_version: Literal[1]  # of this file
    algorithm: Literal["ed25519"]  # name of the key
    key: Digest  # SHA-256, in hex, of the public key that checks it, in DER (SubjectPublicKeyInfo)
    signature: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9+/]{86}==\Z")]  # the 64 bytes, in base64


@dataclass(frozen=True, slots=True)
class Keys:
    """Public keys that are trusted, by their ids."""

    path: Path  # where they were read
    by_id: "Mapping[str, Ed25519PublicKey]"  # each by the SHA-256 of its DER form

    @classmethod
    def load(cls, path: Path) -> "Keys":
        """Read a PEM file of one or more public keys, or every file of a folder but hidden ones.

        Raises:
            KeyFileError: Naming the file that cannot be read or holds anything but public Ed25519 keys, or a folder without any.
        """
        try:
            files = sorted(file for file in path.iterdir() if not file.name.startswith(".")) if path.is_dir() else [path]
        except OSError as error:
            raise KeyFileError(f"{path}: {error.strerror}") from error
        found: dict[str, Ed25519PublicKey] = {}
        for file in files:
            for key in _read_public(file):
                found[key_id(key)] = key
                if len(found) > MAX_KEYS:
                    raise KeyFileError(f"{path}: more than {MAX_KEYS} keys")
        if not found:
            raise KeyFileError(f"{path}: holds no key")
        return cls(path, found)

    def check(self, content: bytes, signature: bytes, name: str) -> None:
        """Do nothing if one of the keys signed these very bytes.

        Args:
            content: What is to be believed.
            signature: What its signature's file holds.
            name: Of what is signed, for messages.

        Raises:
            SignatureError: If the signature is malformed, of an unknown key, or of other bytes.
        """
        from cryptography.exceptions import InvalidSignature

        if len(signature) > MAX_SIGNATURE_BYTES:
            raise SignatureError(f"{name}{SIGNATURE_SUFFIX}: more than {MAX_SIGNATURE_BYTES} bytes")
        try:
            parsed = msgspec.json.decode(signature, type=Signature)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SignatureError(f"{name}{SIGNATURE_SUFFIX}: not a signature: {one_line(str(error))}") from error
        key = self.by_id.get(parsed.key)
        if key is None:
            raise SignatureError(f"{name}: signed with key {parsed.key}, which is not in {self.path}")
        try:
            key.verify(base64.b64decode(parsed.signature), content)
        except InvalidSignature:
            raise SignatureError(f"{name}: is not what key {parsed.key} signed") from None


def sign(path: Path, key: Path, digest: str = "") -> str:
    """Write the signature of a file beside it, and return the key's id.

    Args:
        path: What is signed: `bundle.json`, or `model.toml`.
        key: PEM file of a private Ed25519 key, not encrypted.
        digest: SHA-256 of what was checked before, which is all that is to be signed; empty for any.

    Raises:
        InputError: If one of the two cannot be read, or the key is another kind of file, or the file is not what was checked.
        OSError: If the signature cannot be written.
    """
    private = _read_private(key)
    content = read_given(path, MAX_MANIFEST_BYTES, InputError)
    if digest not in ("", hashlib.sha256(content).hexdigest()):
        raise InputError(f"{path}: has changed since it was checked, and is not signed")
    identity = key_id(private.public_key())
    signature = Signature(
        format_version=1,
        algorithm="ed25519",
        key=identity,
        signature=base64.b64encode(private.sign(content)).decode("ascii"),
    )
    written = msgspec.json.format(msgspec.json.encode(signature), indent=2).decode("ascii")
    write_text(path.with_name(path.name + SIGNATURE_SUFFIX), written + "\n")
    return identity


def check_signed(directory: Path, content: bytes, keys: Keys) -> None:
    """Do nothing if the signature in a bundle's folder is of these bytes, which were read as its manifest, and of one of the keys.

    Raises:
        SignatureError: If it is not, or there is none; it names the file.
    """
    path = directory / SIGNATURE_FILE
    if not path.exists():
        raise SignatureError(f"{directory}: is not signed (there is no {SIGNATURE_FILE}), and signatures are required")
    keys.check(content, read_given(path, MAX_SIGNATURE_BYTES, BundleError), str(directory / MANIFEST_FILE))


def key_id(key: "PublicKeyTypes") -> str:
    """Return a public key's id: `openssl pkey -pubin -in KEY -outform DER | sha256sum` prints the same."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _read_pem(path: Path) -> str:
    try:
        return read_given(path, MAX_KEY_FILE_BYTES, KeyFileError).decode("ascii")
    except UnicodeDecodeError:
        raise KeyFileError(f"{path}: not a PEM file") from None


def _read_public(path: Path) -> "list[Ed25519PublicKey]":
    """Return the keys of a PEM file, of which there is at least one."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    text = _read_pem(path)
    if "PRIVATE KEY-----" in text:
        raise KeyFileError(f"{path}: holds a private key, which only the one who signs may have; give the public one")
    keys: list[Ed25519PublicKey] = []
    for block in text.split(_BEGIN)[1:]:
        try:
            key = load_pem_public_key((_BEGIN + block).encode("ascii"))
        except (ValueError, UnsupportedAlgorithm):
            raise KeyFileError(f"{path}: not a PEM file of public keys") from None
        if not isinstance(key, Ed25519PublicKey):
            raise KeyFileError(f"{path}: holds a key that is not of Ed25519")
        keys.append(key)
    if not keys or text.count(_END) != len(keys):
        raise KeyFileError(f"{path}: not a PEM file of public keys")
    return keys


def _read_private(path: Path) -> "Ed25519PrivateKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read_pem(path).encode("ascii"), password=None)
    except TypeError:
        raise KeyFileError(f"{path}: the key is encrypted; openssl pkey -in {path} writes it as it is") from None
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFileError(f"{path}: not a PEM file of a private key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path}: not a key of Ed25519; openssl genpkey -algorithm ed25519 makes one")
    return key
