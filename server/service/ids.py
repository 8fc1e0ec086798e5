"""Names for what is in the log: requests' ids, the caller's or ours, and incidents."""

import random
from collections.abc import Iterable

from dragoman.server.errors import InvalidRequest

REQUEST_ID_KEY = "x-request-id"
MAX_ID_CHARACTERS = 128
# Seeded by the system, once; asking it for each request costs a system call.
_ids = random.Random()


def new_incident() -> str:
    """Return an id to find one failure, or one request, in the log; unlikely to repeat, and no secret."""
    return f"{_ids.getrandbits(64):016x}"


def choose_request_id(given: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the id in the request, else the one in its metadata, else a new one.

    Args:
        given: What the request itself says; empty for nothing.
        metadata: Pairs of key and value, keys in lower case: gRPC's metadata, HTTP's headers.

    Raises:
        InvalidRequest: If the caller's is not one to log.
    """
    if given:
        return check_request_id("request_id", given)
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and value:
            return check_request_id(REQUEST_ID_KEY, value if isinstance(value, str) else value.decode("latin-1"))
    return new_incident()


def check_request_id(field: str, value: str) -> str:
    """Return a caller's request id as it is; it goes into logs, so it must be harmless there.

    Args:
        field: What to call it in the error.
        value: The id.

    Raises:
        InvalidRequest: If it is too long or has other characters than printable ASCII.
    """
    if len(value) > MAX_ID_CHARACTERS:
        raise InvalidRequest(field, f"{len(value)} characters; at most {MAX_ID_CHARACTERS} are allowed")
    if not (value.isascii() and value.isprintable()):
        raise InvalidRequest(field, "only printable ASCII characters are allowed")
    return value
