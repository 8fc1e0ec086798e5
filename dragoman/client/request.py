"""Requests, their conversion to messages, and the largest that are sent."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeVar

from google.protobuf.message import Message

from dragoman.client.errors import InvalidArgument, TooLarge
from dragoman.client.search import AS_THE_MODEL_DOES, SEARCH_FIELDS, Search, Term
from dragoman.v1 import generation_pb2

AnyMessage = TypeVar("AnyMessage", bound=Message)


@dataclass(frozen=True, slots=True)
class Request:
    """One text to answer; anything but a `str` for it is a `TypeError` at once.

    Attributes:
        text: The source.
        model: Model to ask; may be empty where the server has exactly one.
        max_new_tokens: Tokens to generate at the most; None for the model's default.
        truncate: Cut a source that is too long instead of refusing it.
        priority: Among what waits, be served as if it had come this many seconds earlier.
        search: How the answer is searched for.
        request_id: Id for the server's log; None makes one.
        source_language: Language of the source, by any spelling that `ModelInfo.source_languages` tells; empty for the model's
            default.
        target_language: Language of the answer, by any spelling that `ModelInfo.target_languages` tells; empty for the model's
            default.
        model_version: Which version of the model: its name, what its content gives, or a label; empty for the policy's choice.
    """

    text: str
    model: str = ""
    max_new_tokens: int | None = None
    truncate: bool = False
    priority: int = 0
    search: Search = AS_THE_MODEL_DOES
    request_id: str | None = None
    source_language: str = ""
    target_language: str = ""
    model_version: str = ""

    def __post_init__(self) -> None:
        check_text("text", self.text, "; many texts go to generate_many, or into a Request each for generate_batch")

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing but white space; a server refuses such a text, unless the model goes on with it."""
        return not self.text.strip()


# Fields that are the message's.
_FIELDS: Final = tuple(field.name for field in fields(Request) if field.name != "search")


def check_text(name: str, text: object, hint: str = "") -> None:
    """Raise `TypeError` for a text that is no string, with a hint for a collection of texts."""
    if isinstance(text, str):
        return
    if isinstance(text, bytes | bytearray | memoryview):
        hint = "; decode it first"
    elif text is None or not isinstance(text, Iterable):
        hint = ""
    raise TypeError(f"{name}: a str is wanted, not {'None' if text is None else type(text).__name__}{hint}")


def check_texts(texts: object) -> None:
    """Raise `TypeError` for one text in place of many: its characters would be taken for them."""
    if isinstance(texts, str | bytes | bytearray | memoryview):
        raise TypeError(f"texts: many are wanted, not one {type(texts).__name__}; one text goes to generate")


def checked_request(request: object) -> Request:
    """Return a request; raises `TypeError` for anything else."""
    if not isinstance(request, Request):
        raise TypeError(f"requests: a Request is wanted for each, as in Request(text), not {type(request).__name__}")
    return request


def generate_request(request: Request) -> generation_pb2.GenerateRequest:
    """Return the message; without an id it gets one here, so that all attempts share it. Raises as `fill`."""
    request_id = request.request_id or uuid.uuid4().hex
    values = {name: getattr(request, name) for name in _FIELDS} | {"request_id": request_id}
    if request.search is not AS_THE_MODEL_DOES:
        values |= {name: getattr(request.search, name) for name in SEARCH_FIELDS}
        if request.search.terms:
            values["terms"] = [_term_message(term, request_id) for term in request.search.terms]
    return fill(generation_pb2.GenerateRequest(), values, request_id)


def _term_message(term: object, request_id: str) -> generation_pb2.Term:
    if not isinstance(term, Term):
        raise InvalidArgument(f"terms: {term!r} is of the wrong type ({type(term).__name__})", request_id)
    targets = [term.targets] if isinstance(term.targets, str) else term.targets
    return fill(generation_pb2.Term(), term._replace(targets=targets)._asdict(), request_id)


def fill(message: AnyMessage, values: Mapping[str, object], request_id: str = "") -> AnyMessage:
    """Set those fields of a message whose value is not None; raises `InvalidArgument` naming one that cannot be written at all."""
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
        except (TypeError, AttributeError) as error:
            raise InvalidArgument(f"{name}: {value!r} is of the wrong type ({type(value).__name__})", request_id) from error
    return message


# Servers' default for the largest request.
DEFAULT_MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024
SEND_OPTION: Final = "grpc.max_send_message_length"


def check_size(message: Message, max_bytes: float, request_id: str = "") -> None:
    """Raise `TooLarge`, naming the largest field, if a request is larger than what is sent."""
    size = message.ByteSize()
    if size <= max_bytes:
        return
    name, field_bytes = max(((field.name, _field_bytes(value)) for field, value in message.ListFields()), key=lambda pair: pair[1])
    reason = f"{field_bytes} bytes make the request one of {size}; at most {max_bytes:.0f} are sent ({SEND_OPTION})"
    raise TooLarge(f"{name}: {reason}", request_id, max_bytes=max_bytes)


def _field_bytes(value: object) -> int:
    """Return about how many bytes a field's value takes."""
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if hasattr(value, "__len__") else 8
