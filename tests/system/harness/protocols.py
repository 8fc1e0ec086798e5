"""Every protocol of the server; a new one is added here and has its column in docs/api.md's table."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.system.harness.grpc_client import NativeGrpc, OpenInferenceGrpc
from tests.system.harness.http_client import DeepL, LibreTranslate, NativeHttp, OpenAi, OpenInferenceRest
from tests.system.harness.protocol import Method, ProtocolClient, Query, Refused
from tests.system.harness.server import wait_until

PROTOCOLS: tuple[type[ProtocolClient], ...] = (
    NativeGrpc,
    OpenInferenceGrpc,
    NativeHttp,
    OpenInferenceRest,
    LibreTranslate,
    OpenAi,
    DeepL,
)
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)


def query(method: Method, text: str = "a dog", **more: Any) -> Query:
    return Query(**{"texts": [text] * method.num_texts, "model": "alpha"} | more)


async def refusal(call: Awaitable[Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        await call
    return caught.value


async def eventually(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)
