"""From the bytes of `bundle.json` to a manifest, or to one line that names the file and the field."""

import json
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dragoman.export.fields import BundleError, one_line, shown
from dragoman.export.manifest import FORMAT_VERSION, FileEntry, Manifest
from dragoman.model.files import read_bounded

MAX_MANIFEST_BYTES = 1 << 20


def read_manifest(path: Path) -> Manifest:
    """Read `bundle.json`.

    Raises:
        BundleError: If it is missing, of another format version, or not a manifest; it names the field.
    """
    return parse_manifest(read_manifest_bytes(path), path)


def read_manifest_bytes(path: Path) -> bytes:
    """Return what `bundle.json` holds, for one who checks or compares it before it is believed.

    Raises:
        BundleError: If it is missing, cannot be read, or is larger than any manifest.
    """
    try:
        return read_bounded(path, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error


def parse_manifest(content: bytes, path: Path | str) -> Manifest:
    """Return what the bytes of a manifest say.

    Args:
        content: The bytes.
        path: Where they were read, for messages.

    Raises:
        BundleError: If they are of another format version, or not a manifest; it names the field.
    """
    try:
        fields = _parse(content)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
        raise BundleError(f"{path}: not a bundle's manifest: {reason}") from error
    found = fields.get("format_version")
    if type(found) is not int or found != FORMAT_VERSION:
        raise BundleError(f"{path}: format version {shown(found)}, but this release reads {FORMAT_VERSION}{_advice(found)}")
    try:
        return msgspec.convert(fields, Manifest)
    except msgspec.ValidationError as error:
        raise BundleError(f"{path}: not a bundle's manifest: {_explain(error, fields)}") from error


def _advice(found: object) -> str:
    """Return what to do about another format version."""
    return "; export the checkpoint again" if type(found) is int and 0 < found < FORMAT_VERSION else ""


def _parse(content: bytes) -> dict[str, Any]:
    """Return what a JSON object holds.

    Raises:
        ValueError: If it is none, or says something twice, or holds a number that JSON does not have.
        RecursionError: If it is nested too deeply.
    """
    fields = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{shown(name)} is said twice")
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            raise ValueError(f"{shown(name)} is no Unicode text")
        fields[name] = value
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _explain(error: msgspec.ValidationError, fields: dict[str, Any]) -> str:
    """Return what is wrong; msgspec does not say of which file."""
    for path, entry in fields["files"].items() if "$.files[...]" in str(error) else ():
        try:
            msgspec.convert(entry, FileEntry)
        except msgspec.ValidationError as reason:
            wrong, _, field = str(reason).partition(" - at `$")
            return f"{one_line(wrong)} - at `$.files[{shown(path)}]{field or '`'}"
    return one_line(str(error))
