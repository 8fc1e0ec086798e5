"""What a caller asks for, put on the wire."""

import uuid
from typing import TypeVar

from google.protobuf.message import Message

from client.errors import InvalidArgument
from protos import generation_pb2

AnyMessage = TypeVar("AnyMessage", bound=Message)


def generate_request(
    text: str, *, model: str, max_new_tokens: int | None, truncate: bool, request_id: str | None
) -> generation_pb2.GenerateRequest:
    """Build a request; without an id it gets one here, so that all attempts share it and errors can name it.

    Raises:
        InvalidArgument: As `fill`.
    """
    request = generation_pb2.GenerateRequest()
    request_id = request_id or uuid.uuid4().hex
    fields = {"model": model, "text": text, "truncate": truncate, "request_id": request_id}
    if max_new_tokens is not None:
        fields["max_new_tokens"] = max_new_tokens
    return fill(request, fields, request_id)


def fill(message: AnyMessage, fields: dict[str, object], request_id: str = "") -> AnyMessage:
    """Set the fields of a message and return it.

    Raises:
        InvalidArgument: If a value cannot be written at all, naming the field; everything else is the server's to judge.
    """
    for name, value in fields.items():
        try:
            setattr(message, name, value)
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"{name}: not Unicode text: {error.reason} at character {error.start}", request_id) from error
        except ValueError as error:
            raise InvalidArgument(f"{name}: {value!r} is out of range", request_id) from error
    return message
