"""The certificates of an authority, checked when they are read."""

import ssl
from pathlib import Path

from dragoman.model.errors import InputError


def read_certificates(path: Path) -> bytes:
    """Read a PEM file; gRPC would take anything, and say what is wrong with it at the first call only.

    Raises:
        InputError: If it cannot be read or is not one.
    """
    try:
        content = path.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise InputError(f"{path}: not a PEM file of certificates") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    return content
