"""Answers from the result cache: those of the engine over every protocol, of the version that serves, however calls end."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.errors import CallError
from dragoman.client.sync import Client
from tests.system.harness.callers import PATIENT
from tests.system.harness.grpc_client import NativeGrpc
from tests.system.harness.models import FLAGS, ModelFolder
from tests.system.harness.protocol import ProtocolClient, Query
from tests.system.harness.protocols import each_protocol
from tests.system.harness.server import LONG, Event, Server, kill, serving

pytestmark = pytest.mark.e2e

CALLERS = """
[callers.one]
token = "one"
[callers.two]
token = "two"
"""
CACHE = ("--result-cache-mib", "8")
HITS, TOKENS = "dragoman_result_cache_hits_total", "dragoman_generation_tokens_total"


@pytest.fixture(scope="module")
def server(bundles: Path) -> Iterator[Server]:
    with serving(bundles / "en-de", *CACHE, callers=CALLERS) as server:
        yield server
        server.wait_until_idle()
        assert server.problems() == []


@each_protocol
async def test_an_equal_request_has_the_same_answer_without_the_engine(server: Server, protocol: type[ProtocolClient]) -> None:
    async with NativeGrpc.connect(server, "two") as native, protocol.connect(server, "one") as client:
        for name, method in client.methods.items():
            texts = [f"{protocol.name} {name} plays with {number} dogs." for number in range(method.num_texts)]
            first = await method.call(Query(texts))
            hits, tokens = server.metric(HITS), server.metric(TOKENS)
            assert await method.call(Query(texts)) == first
            assert (server.metric(HITS), server.metric(TOKENS)) == (hits + len(texts), tokens)
            [expected] = await native.methods["Generate"].call(Query(texts[:1]))
            assert server.metric(HITS) == hits + len(texts) and server.metric(TOKENS) > tokens, "callers do not share answers"
            assert first[0].texts[0] == expected.texts[0]


def test_sentences_of_texts_are_found_again(server: Server) -> None:
    with Client(server.address, token="one") as client:
        one = client.generate("A man sees a red bird.")
        hits = server.metric(HITS)
        text = "A man sees a red bird.\n\nA man sees a green bird."
        found = client.generate(text, split="sentences")
        assert found.text.startswith(one.text + "\n\n") and server.metric(HITS) == hits + 1
        assert client.generate(text, split="sentences").segments == found.segments and server.metric(HITS) == hits + 3
        timings = client.generate("A man sees a red bird.").timings
        assert timings.decode_seconds == timings.prefill_seconds == 0 < timings.total_seconds
        computed = client.generate("A man sees a red bird.", no_cache=True)
        assert computed.timings.decode_seconds > 0 and computed.answers == one.answers and server.metric(HITS) == hits + 4
        drawn = [client.generate("A man sees a bird.", do_sample=True, temperature=100.0).text for _ in range(3)]
        assert len(set(drawn)) == 3
    assert server.metric("dragoman_result_cache_bytes") > 0 < server.metric("dragoman_result_cache_saved_seconds_total")


def test_no_request_is_lost_or_answered_wrongly_when_calls_leave_versions_change_and_engines_are_killed(
    models: ModelFolder,
) -> None:
    """Half of the requests are equal to another; two contents of the model alternate."""
    num_requests = 10_000 if LONG else 600
    contents = {models.put("alpha", "1", "one"): "one"}
    models.say("alpha", "[swap]\nprobation_seconds = 0\n")
    texts = [f"a dog runs {number}" for number in range(num_requests // 2)]
    asked = [random.Random(0).choice((texts[0], texts[number % 20], texts[number // 2])) for number in range(num_requests)]
    random.Random(1).shuffle(asked)
    answers = list[tuple[str, Any]]()
    with serving(models.path, *FLAGS, *CACHE) as server, Client(server.address, retry=PATIENT) as client:

        def ask(number: int) -> None:
            if number % 7 == 0:  # a caller that leaves
                with client.stream(asked[number], model="alpha", max_new_tokens=12) as stream:
                    time.sleep(random.random() / 100)
                    stream.cancel()
            try:
                answers.append((asked[number], client.generate(asked[number], model="alpha", max_new_tokens=12)))
            except CallError as error:
                answers.append((asked[number], error))

        with ThreadPoolExecutor(16) as pool:
            for part in range(4):
                calls = [pool.submit(ask, number) for number in range(part, num_requests, 4)]
                if part % 2:
                    kill(*server.engines("alpha"))
                else:
                    version = str(part + 2)
                    contents[models.put("alpha", version, "two" if part else "one")] = "two" if part else "one"
                for call in calls:
                    call.result()
        assert server.metric(HITS) > num_requests / 4
        expected = dict[tuple[str, str], Any]()
        server.wait_until_whole()
        for text, result in answers:
            assert not isinstance(result, CallError), result
            key = text, result.model_version
            known = expected.setdefault(key, result.answers)
            assert result.answers == known and result.model_version in contents
        latest = {text for text, version in expected if version == models.content("two")}
        for text in list(latest)[:50]:
            again = client.generate(text, model="alpha", max_new_tokens=12, no_cache=True)
            assert again.answers == expected[text, again.model_version]
        server.wait_for(Event.VERSIONS_SERVE, model="alpha")
    assert len(answers) == num_requests
