"""A second face, to show what one takes: JSON over a stream, a line for each request and for each answer or piece of one.

    {"do": "generate", "request": {"text": "A dog runs."}, "deadline_seconds": 30}

`do` is `generate`, `stream` or `score`. A caller that closes its connection is gone, and with it what it waits for.
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.errors import InvalidRequest, ServiceError


@dataclass
class Envelope:
    """One line of a caller's."""

    do: Literal["generate", "stream", "score"]
    request: dict[str, Any]
    deadline_seconds: float | None = None


class ToyFace:
    """Serves connections; hand `serve` to `asyncio.start_server`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer line after line; what comes meanwhile waits."""
        line = await reader.readline()
        while line:
            answering = asyncio.create_task(self._answer(line, writer))
            reading = asyncio.create_task(reader.readline())
            await asyncio.wait([answering, reading], return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not reading.result():
                answering.cancel()
            await asyncio.wait([answering])
            line = await reading
        writer.close()

    async def _answer(self, line: bytes, writer: StreamWriter) -> None:
        call = Call.begin("toy/request")
        try:
            with self._core.calls.serving(call):
                await self._run(_parse(line, Envelope), call, writer)
        except ServiceError as error:
            content = {"code": error.code, "message": error.message, "retry_after_seconds": error.retry_after_seconds}
            await _write(writer, {"error": content, "request_id": call.request_id})

    async def _run(self, envelope: Envelope, call: Call, writer: StreamWriter) -> None:
        generation, deadline = self._core.generation, envelope.deadline_seconds
        if envelope.do == "score":
            scores = await generation.score(_convert(envelope.request, ScoreRequest), call, deadline)
            await _write(writer, {"score": scores.score, "tokens": [each.token for each in scores.tokens]})
        elif envelope.do == "generate":
            await _write(writer, await generation.generate(_convert(envelope.request, GenerateRequest), call, deadline))
        else:
            async with generation.stream(_convert(envelope.request, GenerateRequest), call, deadline) as pieces:
                async for piece in pieces:
                    await _write(writer, piece)


def _parse(line: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest("line", str(error)) from None


def _convert(fields: dict[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest("request", str(error)) from None


async def _write(writer: StreamWriter, content: Any) -> None:
    writer.write(msgspec.json.encode(content, enc_hook=list) + b"\n")
    await writer.drain()
