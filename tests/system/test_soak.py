"""A mixed load of everything that callers do and should not do: nothing is lost, left behind, grown, or answered differently.

About 8 seconds; `TEST_SOAK_SECONDS` says otherwise, and with `TEST_LONG=1` it is ten minutes.
"""

import asyncio
import os
import random
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.callers import CALL_SECONDS, NATIVE, OPTIONS, OTHER_PROTOCOLS, RETRYING, Caller, Callers, Kind, Outcome
from tests.system.harness.server import LONG, Event, Server, footprint, kill, processes, serving, wait_until, wait_until_not_grown

pytestmark = pytest.mark.e2e

SECONDS = float(os.environ.get("TEST_SOAK_SECONDS") or (600 if LONG else 8))
PREFACE, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes.fromhex("000000040000000000")
LONG_ANSWER: dict[str, Any] = {"min_new_tokens": 50, "max_new_tokens": 60}
# Endings of calls that were in a killed process; over HTTP the connection ends.
CUT = {"UNAVAILABLE", "503", "error event"}
CUT |= {"ServerDisconnectedError", "ClientOSError", "ClientPayloadError", "ConnectionResetError"}


def refused(code: str, message: bytes, method: str = "Generate") -> Kind:
    async def ask(caller: Caller, model: str, text: str) -> list[Outcome]:
        try:
            await caller.channel.unary_unary(f"/dragoman.v1.Generation/{method}")(message, timeout=CALL_SECONDS)
        except aio.AioRpcError as error:
            if error.code().name == code:
                return []
            raise
        raise AssertionError(f"{method} was answered")

    return ask


async def late(caller: Caller, model: str, text: str) -> list[Outcome]:
    try:
        await caller.stub.Generate(GenerateRequest(model=model, text=text, **LONG_ANSWER), timeout=0.02)
    except aio.AioRpcError as error:
        if error.code().name != "DEADLINE_EXCEEDED":
            raise
    return []


async def cancelled(caller: Caller, model: str, text: str) -> list[Outcome]:
    call = caller.stub.GenerateStream(GenerateRequest(model=model, text=text, **LONG_ANSWER), timeout=CALL_SECONDS)
    await anext(aiter(call))
    call.cancel()
    return []


async def closed_channel(caller: Caller, model: str, text: str) -> list[Outcome]:
    async with aio.insecure_channel(caller.address, OPTIONS) as channel:
        stub: Any = GenerationStub(channel)
        await anext(aiter(stub.GenerateStream(GenerateRequest(model=model, text=text, **LONG_ANSWER), timeout=CALL_SECONDS)))
    return []


def no_http2(content: bytes, *, is_reset: bool = False) -> Kind:
    """Return a kind of bytes upon which the server has to close the connection, if the caller does not reset it."""

    async def send(caller: Caller, model: str, text: str) -> list[Outcome]:
        host, _, port = caller.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(content)
            if is_reset:
                await writer.drain()
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                with suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.transport.abort()
        return []

    return send


def wrong(**fields: Any) -> bytes:
    return GenerateRequest(**{"text": "A dog.", **fields}).SerializeToString()


MISBEHAVING: dict[str, Kind] = {
    "late": late,
    "cancelled": cancelled,
    "closed channel": closed_channel,
    "not UTF-8": refused("INVALID_ARGUMENT", b"\x12\x02\xff\xfe"),
    "not a message": refused("INVALID_ARGUMENT", b"\xff" * 40),
    "too long": refused("INVALID_ARGUMENT", wrong(text="word " * 50_000)),
    "no tokens": refused("INVALID_ARGUMENT", wrong(max_new_tokens=0)),
    "too large": refused("RESOURCE_EXHAUSTED", wrong(text="x" * (5 * 2**20))),
    "unknown method": refused("UNIMPLEMENTED", b"", "NoSuchMethod"),
    "not HTTP/2": no_http2(random.Random(0).randbytes(512)),
    "broken HTTP/2": no_http2(PREFACE + SETTINGS + b"\x00\x00\x08\x01\x04\x00\x00\x00\x00" * 9),
    "reset": no_http2(PREFACE + SETTINGS[:4], is_reset=True),
}


def kill_in_turn(server: Server) -> None:
    for pid in (server.engine(1), server.frontends()[1]):
        time.sleep(SECONDS / 5)
        kill(pid)
    server.wait_for(Event.FRONTEND_READY, front_end=1)


@pytest.mark.timeout(3600)
def test_a_mixed_load_loses_nothing_and_leaves_nothing(topology: tuple[str, ...], bundles: Path, captions: list[str]) -> None:
    """With several processes of each kind, one of each is killed meanwhile: only what was in it ends, with UNAVAILABLE."""
    texts, behaving = captions[::17], {**NATIVE, **OTHER_PROTOCOLS}
    with serving(bundles / "en-de", *topology, "--num-threads", "1", "--max-slots", "16") as server:
        server.wait_until_whole()
        with Callers(server, ["en-de"], kinds={**behaving, **MISBEHAVING}, texts=texts, num=8) as callers:
            callers.wait_for_more(200)  # pools, arenas and caches fill
        server.wait_until_idle()
        answered = server.metric("dragoman_request_success_total")
        has_kills, everything = server.num_frontends > 1, processes(server)
        before = footprint(everything - ({server.engine(1), server.frontends()[1]} if has_kills else set()))
        end = time.monotonic() + SECONDS
        with (
            Callers(server, ["en-de"], kinds=behaving, texts=texts, num=8, seed=1) as callers,
            Callers(server, ["en-de"], kinds=MISBEHAVING, texts=texts, num=4, pause_seconds=0.05, seed=2) as misbehaving,
            Callers(server, ["en-de"], kinds=RETRYING, texts=texts, num=4, seed=3) as retrying,
        ):
            if has_kills:
                kill_in_turn(server)
            wait_until(lambda: time.monotonic() > end, "the time is over", SECONDS + 60)
        for each in (callers, misbehaving, retrying):
            assert each.statuses.keys() <= (CUT if has_kills else set()), each.failures[:5]
            assert each.answered_differently() == []
        assert retrying.failures == []
        assert len(callers.failures) <= 0.02 * len(callers.answers) + 16 * has_kills
        assert {answer.kind for answer in callers.answers} == behaving.keys()
        assert {answer.kind for answer in misbehaving.answers} == MISBEHAVING.keys()
        server.wait_until_whole()
        server.wait_until_idle()
        assert server.metric("dragoman_engine_restarts_total") == has_kills
        assert len(processes(server)) == len(everything)
        wait_until_not_grown(before)
        if not has_kills:  # the counts of a process that is killed are lost with it
            least = len(callers.answers) + len(retrying.answers)
            most = least + sum(answer.kind in ("late", "cancelled", "closed channel") for answer in misbehaving.answers)
            assert least <= server.metric("dragoman_request_success_total") - answered <= most
            assert server.problems() == []
