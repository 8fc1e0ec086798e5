"""JSON of callers: unlike in Python, no duplicate keys, NaN, infinities or lone surrogates."""

import json
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from dragoman.server.errors import InvalidRequest

T = TypeVar("T")

MAX_REASON_CHARACTERS = 200
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def one_line(reason: object) -> str:
    """Return the first line of a reason, truncated."""
    line = " ".join(str(reason).partition("\n")[0].split()).encode(errors="backslashreplace").decode()
    return line if len(line) <= MAX_REASON_CHARACTERS else line[:MAX_REASON_CHARACTERS] + "..."


def decode_json(body: bytes | memoryview, kind: type[T], field: str = "body") -> T:
    """Decode JSON; raise `InvalidRequest` of `field` if it is malformed or of another type, of a key if that is given twice."""
    try:
        text = str(body, "utf-8")
        # json.loads, as msgspec accepts duplicate keys
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()  # raises for a lone surrogate
        return msgspec.convert(content, kind)
    except (ValueError, msgspec.ValidationError) as error:
        raise InvalidRequest(field, f"cannot be read: {one_line(error)}") from None
    except RecursionError:
        raise InvalidRequest(field, "cannot be read: too many brackets within each other") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        unseen = dict(pairs)
        twice = next(key for key, _ in pairs if unseen.pop(key, pairs) is pairs)
        raise InvalidRequest(one_line(twice), "is given twice")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
