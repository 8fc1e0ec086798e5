"""OpenAI's files and batches (https://platform.openai.com/docs/api-reference/batch; differences in docs/call.md)."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import aiohttp
import msgspec
import structlog
from aiohttp import web
from msgspec import Meta, Struct

from dragoman.server.errors import InvalidRequest, ServiceError, Unavailable
from dragoman.server.protocols.http.forms import MALFORMED, MAX_FIELDS, MULTIPART, check_boundary
from dragoman.server.protocols.http.native import read_generate, to_generate_text
from dragoman.server.protocols.http.requests import BODY_SECONDS, Endpoint, Exchange, check_content_type
from dragoman.server.protocols.http.responses import JSON, NATIVE_ERRORS, OPENAI_ERRORS, HttpRefusal, json_response
from dragoman.server.protocols.json_text import decode_json
from dragoman.server.protocols.openai.api import to_response
from dragoman.server.protocols.openai.reading import to_completion
from dragoman.server.protocols.v1.messages import MessageLimit
from dragoman.server.service.answers import Generated
from dragoman.server.service.batch_store import KEPT_SECONDS, MAX_FILE_BYTES, WINDOW_SECONDS, Batch, BatchStore, new_id
from dragoman.server.service.batches import BatchRunner, BrokenLine, Line
from dragoman.server.service.callers import RETRY_SECONDS
from dragoman.server.service.in_flight import StreamLimit
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.service import Service

T = TypeVar("T")

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"
# Around the body of a line's request.
ENVELOPE_BYTES = 4096
MAX_CUSTOM_ID_CHARACTERS = 512
# Uploads at once, and of one caller; time of one; bytes that are written at once; and bytes of a field beside the file.
MAX_UPLOADS, MAX_UPLOADS_PER_CALLER, UPLOAD_SECONDS = 16, 4, 3600.0
WRITE_BYTES, MAX_FIELD_BYTES = 2**20, 8192
MAX_FILENAME_CHARACTERS = 255
# Of a page: OpenAI's.
MAX_FILES_LISTED, MAX_BATCHES_LISTED, BATCHES_LISTED = 10_000, 100, 20

log = structlog.get_logger("dragoman.batches")


Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class OutputExpiry(Struct, forbid_unknown_fields=True):
    """Time after which the results of a batch are removed."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=KEPT_SECONDS)]


class NewBatch(Struct, forbid_unknown_fields=True):
    """A request for a batch."""

    input_file_id: str
    endpoint: Literal["/v1/completions", "/v1/chat/completions", "/v1/generate"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchApi:
    """Endpoints of files and batches; without a store, they are off."""

    def __init__(self, service: Service, max_message_bytes: int, store: BatchStore | None) -> None:
        self._max_bytes, self._store = max_message_bytes, store
        self._uploads = StreamLimit("uploads", MAX_UPLOADS, MAX_UPLOADS_PER_CALLER)
        self._runner: BatchRunner | None = None
        if store is not None:
            read = partial(read_line, max_message_bytes=max_message_bytes)
            limit = MessageLimit(max_message_bytes)
            self._runner = BatchRunner(store, service, limit, max_message_bytes + ENVELOPE_BYTES, read)
            service.metrics.watch_batches(lambda: 0 if self._runner is None else self._runner.num_lines_left)

    def endpoints(self) -> Iterable[Endpoint]:
        """Return the endpoints. Their calls do not count as requests under way, which the lines of a batch may all be."""
        endpoint = partial(Endpoint, errors=OPENAI_ERRORS, has_items=True)
        return (
            endpoint("POST", "/v1/files", self.upload, is_upload=True),
            endpoint("GET", "/v1/files", self.files),
            endpoint("GET", "/v1/files/{id}", self.file),
            endpoint("GET", "/v1/files/{id}/content", self.content),
            endpoint("DELETE", "/v1/files/{id}", self.delete),
            endpoint("POST", "/v1/batches", self.create, read=_read_new),
            endpoint("GET", "/v1/batches", self.batches),
            endpoint("GET", "/v1/batches/{id}", self.batch),
            endpoint("POST", "/v1/batches/{id}/cancel", self.cancel, is_upload=True),
        )

    async def start(self, _: web.Application) -> None:
        """Start to run batches, as `on_startup`."""
        if self._runner is not None:
            self._runner.start()

    async def close(self, _: web.Application) -> None:
        """Stop running batches, as `on_shutdown`."""
        if self._runner is not None:
            await self._runner.close()

    async def upload(self, exchange: Exchange) -> web.Response:
        """Keep a file."""
        request, owner = exchange.http, _owner(exchange)
        check_content_type(request, MULTIPART)
        most = MAX_FILE_BYTES + 2**16  # the form around it
        if (size := request.content_length or most) > most:
            message = f"file: has more than {MAX_FILE_BYTES} bytes"
            raise HttpRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        if "Content-Encoding" in request.headers:
            raise HttpRefusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Encoding: files are read uncompressed")
        with self._uploads.stream(owner):
            store = self._opened()
            part: Path = await self._do(store.begin_file, owner, size)
            try:
                async with asyncio.timeout(UPLOAD_SECONDS):
                    fields = await self._receive(request, part)
                seconds = _kept_seconds(fields)
                kept = await self._do(store.keep_file, part, part.stem, fields["filename"], "batch", seconds)
            except TimeoutError:
                raise HttpRefusal(HTTPStatus.REQUEST_TIMEOUT, "the file did not come in time") from None
            finally:
                part.unlink(missing_ok=True)
        return json_response(kept)

    async def files(self, exchange: Exchange) -> web.Response:
        """Return the caller's files."""
        query = exchange.http.query
        found = await self._do(self._opened().files, _owner(exchange))
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise InvalidRequest("order", "is neither asc nor desc")
        found = [file for file in found if query.get("purpose", file.purpose) == file.purpose]
        if order == "desc":
            found.reverse()
        if after := query.get("after"):
            found = [file for file in found if (file.id < after if order == "desc" else file.id > after)]
        most = _limit(query.get("limit"), MAX_FILES_LISTED, MAX_FILES_LISTED)
        return json_response(_page(msgspec.to_builtins(found[:most]), has_more=len(found) > most))

    async def file(self, exchange: Exchange) -> web.Response:
        """Return the description of a file."""
        return json_response(await self._do(self._opened().find_file, _owner(exchange), exchange.http.match_info["id"]))

    async def content(self, exchange: Exchange) -> web.StreamResponse:
        """Return the content of a file."""
        path = await self._do(self._opened().path_of, _owner(exchange), exchange.http.match_info["id"])
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def delete(self, exchange: Exchange) -> web.Response:
        """Delete a file."""
        name = exchange.http.match_info["id"]
        await self._do(self._opened().delete_file, _owner(exchange), name)
        return json_response({"id": name, "object": "file", "deleted": True})

    async def create(self, exchange: Exchange) -> web.Response:
        """Begin a batch."""
        asked: NewBatch = exchange.message
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=asked.metadata,
            owner=_owner(exchange),
            output_seconds=KEPT_SECONDS if asked.output_expires_after is None else asked.output_expires_after.seconds,
        )
        await self._do(self._opened().add_batch, batch)
        return json_response(_described(batch))

    async def batches(self, exchange: Exchange) -> web.Response:
        """Return a page of the caller's batches."""
        query = exchange.http.query
        most = _limit(query.get("limit"), BATCHES_LISTED, MAX_BATCHES_LISTED)
        found, has_more = await self._do(self._opened().batches, _owner(exchange), query.get("after", ""), most)
        return json_response(_page([_described(batch) for batch in found], has_more=has_more))

    async def batch(self, exchange: Exchange) -> web.Response:
        """Return a batch."""
        found = await self._do(self._opened().find_batch, _owner(exchange), exchange.http.match_info["id"])
        return json_response(_described(found))

    async def cancel(self, exchange: Exchange) -> web.Response:
        """Cancel a batch."""
        found = await self._do(self._opened().cancel, _owner(exchange), exchange.http.match_info["id"])
        return json_response(_described(found))

    def _opened(self) -> BatchStore:
        if self._store is None:
            raise HttpRefusal(HTTPStatus.NOT_FOUND, "files and batches are off; an operator turns them on with batch_folder")
        return self._store

    async def _do(self, work: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._opened().run(work, *arguments)
        except OSError as error:
            log.warning("batch_folder cannot be used", reason=error.strerror)
            raise Unavailable("file: the server's folder of files cannot be used now", RETRY_SECONDS) from None

    async def _receive(self, request: web.Request, part: Path) -> dict[str, str]:
        """Write the file of a form to a path; return the other fields, and its name as `filename`."""
        content, kind, fields = request.content, request.headers["Content-Type"], dict[str, str]()
        try:
            line = await _in_time(content.readline())
            check_boundary(line.rstrip(b"\r\n"), kind)
            content.unread_data(line)
            form = aiohttp.MultipartReader({"Content-Type": kind}, content)
            while (each := await _in_time(form.next())) is not None:
                if isinstance(each, aiohttp.MultipartReader) or each.name is None or len(fields) >= MAX_FIELDS:
                    raise InvalidRequest("body", "has a part that is no field of a form, or too many")
                name = "filename" if each.name == "file" else each.name
                if name in fields:
                    raise InvalidRequest(each.name, "is given twice")
                if each.name == "file":
                    fields[name] = (each.filename or "file")[:MAX_FILENAME_CHARACTERS]
                    await self._write(each, part)
                else:
                    value = bytearray()
                    while chunk := await _in_time(each.read_chunk(MAX_FIELD_BYTES)):
                        value += chunk
                        if len(value) > MAX_FIELD_BYTES:
                            raise InvalidRequest(name, f"has more than {MAX_FIELD_BYTES} bytes")
                    fields[name] = value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest("body", "is no UTF-8") from None
        except (*MALFORMED, web.RequestPayloadError):
            raise InvalidRequest("body", "is no form in parts") from None
        if "filename" not in fields:
            raise InvalidRequest("file", "is missing")
        return fields

    async def _write(self, each: aiohttp.BodyPartReader, path: Path) -> None:
        file = await self._do(path.open, "wb")
        with file:
            size, buffer = 0, bytearray()
            while chunk := await _in_time(each.read_chunk(2**16)):
                buffer += chunk
                size += len(chunk)
                if size > MAX_FILE_BYTES:
                    raise HttpRefusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"file: has more than {MAX_FILE_BYTES} bytes")
                if len(buffer) >= WRITE_BYTES:
                    await self._do(file.write, bytes(buffer))
                    buffer.clear()
            await self._do(file.write, bytes(buffer))
            await self._do(file.flush)


async def _read_new(request: web.Request, body: bytes) -> NewBatch:
    check_content_type(request, JSON)
    return decode_json(body, NewBatch)


async def _in_time(data: Any) -> Any:
    """Wait for the next bytes of a body; raise `TimeoutError`."""
    async with asyncio.timeout(BODY_SECONDS):
        return await data


def _kept_seconds(fields: dict[str, str]) -> int:
    """Return the time that a file is kept, from the fields beside it; raise `InvalidRequest`."""
    if fields.get("purpose") != "batch":
        raise InvalidRequest("purpose", "is not batch, the only one")
    expiry = {name: fields[key] for name in ("anchor", "seconds") if (key := f"expires_after[{name}]") in fields}
    try:
        return msgspec.convert(expiry, OutputExpiry, strict=False).seconds if expiry else KEPT_SECONDS
    except (ValueError, msgspec.ValidationError):
        raise InvalidRequest("expires_after", f"is not created_at and 3600 to {KEPT_SECONDS} seconds") from None


def _limit(given: str | None, default: int, most: int) -> int:
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 9 and 0 < int(given) <= most):
        raise InvalidRequest("limit", f"is not in 1 to {most}")
    return int(given)


def _owner(exchange: Exchange) -> str:
    """Return the name of the caller; without authentication all are one."""
    return "" if exchange.call.caller is None else exchange.call.caller.name


def _page(found: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    ids = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, "has_more": has_more, **ids}


def _described(batch: Batch) -> dict[str, Any]:
    """Return OpenAI's description of a batch."""
    content: dict[str, Any] = msgspec.to_builtins(batch)
    for name in ("owner", "output_seconds", "result_ids"):
        del content[name]
    content["errors"] = {"object": "list", "data": content["errors"]} if content["errors"] else None
    if usage := content["usage"]:
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        usage["total_tokens"] = usage["input_tokens"] + usage["output_tokens"]
    return content


def read_line(text: bytes, endpoint: str, *, max_message_bytes: int) -> Line:
    """Convert a line of a batch's input, its body as the endpoint does; raise `BrokenLine`."""
    try:
        content = decode_json(text, dict[str, Any])
    except InvalidRequest as error:
        message = error.message.replace("body: cannot be read", "the line is no JSON object", 1)
        raise BrokenLine("invalid_json_line", message) from None
    custom_id, body = content.get("custom_id"), content.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        message = f"custom_id: is missing, or no text of at most {MAX_CUSTOM_ID_CHARACTERS} characters"
        raise BrokenLine("missing_required_parameter", message, "custom_id")
    if content.get("method") != "POST":
        raise BrokenLine("invalid_method", "method: is not POST", "method")
    if content.get("url") != endpoint:
        raise BrokenLine("invalid_url", f"url: is not {endpoint}, the endpoint of the batch", "url")
    if not isinstance(body, dict):
        raise BrokenLine("invalid_request", "body: is no JSON object", "body")
    if unknown := content.keys() - {"custom_id", "method", "url", "body"}:
        raise BrokenLine("unknown_parameter", "the line has other members than custom_id, method, url and body", min(unknown)[:64])
    try:
        return _to_line(custom_id, msgspec.json.encode(body), endpoint, max_message_bytes)
    except ServiceError as error:
        told = msgspec.json.decode(OPENAI_ERRORS.write(error, ""))["error"]
        raise BrokenLine("invalid_request", told["message"], told["param"]) from None


def _to_line(custom_id: str, body: bytes, endpoint: str, max_message_bytes: int) -> Line:
    errors = OPENAI_ERRORS
    requests: Sequence[GenerateRequest]
    if endpoint == GENERATE:
        errors, requests = NATIVE_ERRORS, [read_generate(body)]
    else:
        asked = to_completion(body, endpoint == CHAT)
        if asked.is_streamed:
            raise InvalidRequest("stream", "is not for batches")
        requests = asked.requests

    async def respond(answered: Sequence[Generated], request_id: str) -> bytes:
        if endpoint == GENERATE:
            return envelope(request_id, HTTPStatus.OK, (await to_generate_text(answered[0], max_message_bytes)).encode())
        return envelope(request_id, HTTPStatus.OK, msgspec.json.encode(to_response(asked, answered, request_id)))

    def refuse(error: ServiceError, request_id: str) -> bytes:
        if isinstance(error, BrokenLine):
            told = {"code": error.error.code, "message": error.message}
            return msgspec.json.encode({"id": line_id(), "custom_id": custom_id, "response": None, "error": told})
        response = errors.response(error, request_id)
        assert isinstance(response.body, bytes)
        return envelope(request_id, response.status, response.body)

    def envelope(request_id: str, status: int, content: bytes) -> bytes:
        response = {"status_code": int(status), "request_id": request_id, "body": msgspec.Raw(content)}
        return msgspec.json.encode({"id": line_id(), "custom_id": custom_id, "response": response, "error": None})

    def line_id() -> str:
        return f"batch_req_{secrets.token_hex(16)}"

    return Line(custom_id, requests, respond, refuse, len(body))
