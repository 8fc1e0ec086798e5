"""HTTP responses: status codes of errors, and each protocol's error format."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import quote

import msgspec
from aiohttp import web
from google.protobuf import json_format
from google.rpc.status_pb2 import Status

from dragoman.server.errors import ServiceError
from dragoman.server.protocols.v1.messages import to_message

JSON = "application/json"
# google.rpc.Code's mapping to HTTP; 499 is nginx's status for a client that closed the connection.
STATUSES = {
    "CANCELLED": 499,
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "FAILED_PRECONDITION": HTTPStatus.BAD_REQUEST,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
}
# LibreTranslate's and DeepL's different statuses, and their names of fields.
LIBRETRANSLATE_STATUSES = {
    "UNAUTHENTICATED": HTTPStatus.FORBIDDEN,
    "NOT_FOUND": HTTPStatus.BAD_REQUEST,
    "UNIMPLEMENTED": HTTPStatus.BAD_REQUEST,
}
# OpenAI's types of errors, and its names of fields.
OPENAI_TYPES = {
    "INVALID_ARGUMENT": "invalid_request_error",
    "NOT_FOUND": "invalid_request_error",
    "UNAUTHENTICATED": "authentication_error",
    "RESOURCE_EXHAUSTED": "rate_limit_error",
}
OPENAI_FIELDS = {"text": "prompt", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
LIBRETRANSLATE_FIELDS = {"text": "q", "source_language": "source", "target_language": "target"}
DEEPL_FIELDS = {"source_language": "source_lang", "target_language": "target_lang"}
DEEPL_FIELDS |= {"markup": "tag_handling", "glossary": "glossary_id", "split": "split_sentences"}


class HttpRefusal(ServiceError):
    """A request refused at the HTTP level, with its own status."""

    code = "INVALID_ARGUMENT"
    refusal = "invalid"

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


class PathNotFound(HttpRefusal):
    """No endpoint has this path."""

    code = "NOT_FOUND"

    def __init__(self, instead: str = "") -> None:
        super().__init__(HTTPStatus.NOT_FOUND, f"nothing is at this path{instead and '; '}{instead}")


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """Error format of a protocol; `write` returns an error's JSON for a request id."""

    write: Callable[[ServiceError, str], str]
    event: str = ""  # name of the server-sent event with an error; empty for an unnamed event
    statuses: Mapping[str, int] = field(default_factory=dict)  # that differ from `STATUSES`
    content_type: str = JSON

    def response(self, error: ServiceError, request_id: str = "") -> web.Response:
        """Return the response to a failed request."""
        headers = {"Content-Type": self.content_type}
        if isinstance(error, HttpRefusal):
            status = error.status
            headers |= error.headers
        else:
            status = self.statuses.get(error.code) or STATUSES.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
        if error.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
        if status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(body=self.write(error, request_id).encode(), status=status, headers=headers)


def json_response(content: object) -> web.Response:
    """Return a JSON response of content that msgspec encodes."""
    return web.Response(body=msgspec.json.encode(content), content_type=JSON)


def file_response(content: bytes, filename: str, media_type: str) -> web.Response:
    """Return a file to be saved."""
    disposition = f"attachment; filename*=UTF-8''{quote(filename, safe='')}"
    return web.Response(body=content, headers={"Content-Disposition": disposition, "Content-Type": media_type})


def _google_status(error: ServiceError, request_id: str) -> str:
    message = to_message(error, request_id)
    status = Status(code=message.code, message=message.message, details=message.details)
    return json_format.MessageToJson(status, indent=None, ensure_ascii=False)


def _error(message: str) -> str:
    return msgspec.json.encode({"error": message}).decode()


def _libretranslate_error(error: ServiceError, _: str) -> str:
    return _error(_renamed(error.message, LIBRETRANSLATE_FIELDS))


def _deepl_error(error: ServiceError, _: str) -> str:
    return msgspec.json.encode({"message": _renamed(error.message, DEEPL_FIELDS), "detail": error.code.lower()}).decode()


def _renamed(message: str, fields: Mapping[str, str]) -> str:
    """Return a message that begins with a protocol's name of the field, if it begins with a field."""
    name, colon, reason = message.partition(": ")
    return f"{fields.get(name, name)}{colon}{reason}"


def _openai_error(error: ServiceError, _: str) -> str:
    name, colon, reason = error.message.partition(": ")
    known = OPENAI_FIELDS.get(name, name)
    kind = OPENAI_TYPES.get(error.code, "server_error")
    told = {"message": f"{known}{colon}{reason}", "type": kind, "param": known if colon and " " not in known else None}
    return msgspec.json.encode({"error": {**told, "code": error.code.lower()}}).decode()


NATIVE_ERRORS = ErrorFormat(_google_status, "error", content_type=f"{JSON}; charset=utf-8")
OPENINFERENCE_ERRORS = ErrorFormat(lambda error, _: _error(error.message))
LIBRETRANSLATE_ERRORS = ErrorFormat(_libretranslate_error, statuses=LIBRETRANSLATE_STATUSES)
DEEPL_ERRORS = ErrorFormat(_deepl_error, statuses=LIBRETRANSLATE_STATUSES)
OPENAI_ERRORS = ErrorFormat(_openai_error)
