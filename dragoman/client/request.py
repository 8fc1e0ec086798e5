"""What a caller asks for, put on the wire."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from google.protobuf.message import Message

from dragoman.client.errors import InvalidArgument
from dragoman.client.search import GREEDY, Search
from dragoman.v1 import generation_pb2

AnyMessage = TypeVar("AnyMessage", bound=Message)


@dataclass(frozen=True, slots=True)
class Request:
    """One text to answer.

    Attributes:
        text: The source.
        model: Model to ask; may be empty where the server has exactly one.
        max_new_tokens: Tokens to generate at the most; None for the model's default.
        truncate: Cut a source that is too long instead of refusing it.
        priority: Among what waits, be served as if it had come this many seconds earlier.
        search: How the answer is searched for.
        request_id: Id for the server's log; None makes one.
    """

    text: str
    model: str = ""
    max_new_tokens: int | None = None
    truncate: bool = False
    priority: int = 0
    search: Search = GREEDY
    request_id: str | None = None


def generate_request(request: Request) -> generation_pb2.GenerateRequest:
    """Return the message; without an id it gets one here, so that all attempts share it and errors can name it.

    Raises:
        InvalidArgument: As `fill`.
    """
    request_id = request.request_id or uuid.uuid4().hex
    values: dict[str, object] = {
        "model": request.model,
        "text": request.text,
        "truncate": request.truncate,
        "request_id": request_id,
        "max_new_tokens": request.max_new_tokens,
        "priority": request.priority,
    }
    if request.search is not GREEDY:
        values |= {field.name: getattr(request.search, field.name) for field in fields(Search)}
    return fill(generation_pb2.GenerateRequest(), values, request_id)


def fill(message: AnyMessage, values: Mapping[str, object], request_id: str = "") -> AnyMessage:
    """Set the fields of a message, but those whose value is None, and return it.

    Raises:
        InvalidArgument: If a value cannot be written at all, naming the field; everything else is the server's to judge.
    """
    for name, value in values.items():
        try:
            if isinstance(value, Sequence) and not isinstance(value, str):
                getattr(message, name).extend(value)
            elif value is not None:
                setattr(message, name, value)
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"{name}: not Unicode text: {error.reason} at character {error.start}", request_id) from error
        except ValueError as error:
            raise InvalidArgument(f"{name}: {value!r} is out of range", request_id) from error
    return message
