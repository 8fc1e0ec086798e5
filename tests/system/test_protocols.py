"""Every protocol: the same answers, the status of its protocol for each kind of error, slots that are free at once.

By default 150 sentences go through every method of every protocol without options, and some of them with each of the options. With
`TEST_LONG=1` 500 of them do with all options.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from dragoman.model.corpus import read_lines
from dragoman.server.service.sentences import split_text
from tests.system.harness.grpc_client import NativeGrpc
from tests.system.harness.http_client import LibreTranslate
from tests.system.harness.protocol import Answer, Method, ProtocolClient, Query
from tests.system.harness.protocols import PROTOCOLS, each_protocol, eventually, query, refusal
from tests.system.harness.server import LONG, ROOT, Event, Server, is_stopped, serving, stopped

pytestmark = pytest.mark.e2e

NUM_SENTENCES = 500 if LONG else 150
NUM_WITH_OPTIONS = NUM_SENTENCES if LONG else 10
CONCURRENCY = 48
OPTIONS: dict[str, dict[str, Any]] = {
    "n-best": {"num_beams": 3, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.6, "early_stopping": True},
    "sampling": {"do_sample": True, "seed": 2**40 + 1, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "num_return_sequences": 3},
    "lengths": {"forced_prefix": "Ein", "min_new_tokens": 12, "max_new_tokens": 16, "return_log_probs": True},
    "likeliest tokens": {"num_beams": 2, "num_return_sequences": 2, "top_log_probs": 3, "max_new_tokens": 60},
    "alternatives": {"return_alternatives": True, "num_return_sequences": 3, "forced_prefix": "Ein"},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppressed_tokens": [5, 6, 7]},
    "terms": {"terms": [{"source": "man", "targets": ["Herr"]}, {"source": "a", "targets": ["Klavier"]}], "num_beams": 3},
    "others": {"truncate": True, "priority": 3, "source_language": "en", "target_language": "de"},
}
TOKEN, OTHER, HURRIED, LATE, LATEST = "web-token", "other-token", "hurried-token", "late-token", "latest-token"
# Deadlines of the last three pass before there can be an answer.
CALLERS = f"""
[callers.web]
token = "{TOKEN}"
[callers.other]
token = "{OTHER}"
[callers.hurried]
token = "{HURRIED}"
max_deadline_seconds = 0.1
[callers.late]
token = "{LATE}"
default_deadline_seconds = 0.1
[callers.latest]
token = "{LATEST}"
default_deadline_seconds = 0.000001
"""
MAX_MESSAGE_BYTES = 64 * 2**10
# No answer to one caller may have these.
SECRETS = ("Traceback", ".py", str(ROOT), OTHER, "the neighbour's text")


@pytest.fixture(scope="session")
def sentences(request: pytest.FixtureRequest, captions: list[str]) -> list[str]:
    try:
        lines = read_lines(request.getfixturevalue("multi30k") / "test_2016_flickr.en.gz")
    except pytest.skip.Exception:
        lines = [caption.removesuffix(".") + end for end in (".", " at night.", ", in the morning.") for caption in captions]
    single = [line for line in lines if line.endswith(".") and line.count(".") == 1 and not {*line} & {*'!?…"()'}]
    assert len(single) >= NUM_SENTENCES
    return single[:NUM_SENTENCES]


async def answers(client: ProtocolClient, method: Method, texts: list[str], options: dict[str, Any]) -> list[Answer]:
    limit = asyncio.Semaphore(CONCURRENCY)

    async def call(group: list[str]) -> list[Answer]:
        async with limit:
            return await method.call(Query(group, options))

    groups = [texts[start : start + method.num_texts] for start in range(0, len(texts), method.num_texts)]
    return [answer for group in await asyncio.gather(*map(call, groups)) for answer in group]


async def check_all_methods(server: Server, texts: list[str], options: dict[str, Any]) -> int:
    num_methods = 0
    async with NativeGrpc.connect(server) as native:
        expected = await answers(native, native.methods["Generate"], texts, options)
    assert len(expected) == len(texts) and all(answer.texts[0] for answer in expected)
    for protocol in PROTOCOLS:
        async with protocol.connect(server) as client:
            for name, method in client.methods.items():
                if client.supports(name, options):
                    found = await answers(client, method, texts, options)
                    for text, wanted, answer in zip(texts, expected, found, strict=True):
                        assert answer == client.project(wanted), (client.name, name, text)
                    num_methods += 1
    return num_methods


async def test_sentences_have_one_answer_over_every_protocol(server: Server, sentences: list[str]) -> None:
    assert await check_all_methods(server, sentences, {}) >= 16


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
async def test_options_mean_the_same_over_every_protocol(server: Server, sentences: list[str], options: dict[str, Any]) -> None:
    """Scores and log-probabilities to the last bit."""
    assert await check_all_methods(server, sentences[:: NUM_SENTENCES // NUM_WITH_OPTIONS], options) >= 14


GAPS = (" ", "\n", "\n\n", " \r\n\t", "\u2028", "\n - ", "\n\n## ", "\n...\n", "  ", "\n> * ", " 😀\n", "\n1) ")


def paragraphs(sentences: list[str], random: Random, count: int) -> list[list[str]]:
    """Return texts as lists: what is kept, a sentence, what is kept, …, a sentence, what is kept."""
    found = []
    for _ in range(count):
        text = [random.choice(("", "\n", "\t# "))]
        for sentence in random.sample(sentences, random.randint(1, 6)):
            text += [sentence, random.choice(GAPS)]
        found.append([*text[:-1], random.choice(("", "\n", " \n\n"))])
    return found


async def test_a_text_is_divided_alike_over_every_protocol(server: Server, sentences: list[str]) -> None:
    """All but sentences stays byte for byte, and each sentence is translated as alone."""
    single = [line for line in sentences if list(split_text(line)) == [(line, True)]]
    texts = paragraphs(single, Random(0), 1000 if LONG else 30)
    async with NativeGrpc.connect(server) as native:
        method = native.methods["Generate"]
        alone = {line: answer.texts[0] for line, answer in zip(single, await answers(native, method, single, {}), strict=True)}
        wanted = await answers(native, method, list(map("".join, texts)), {"split": "sentences"})
    assert [answer.texts for answer in wanted] == [["".join(alone.get(part, part) for part in text)] for text in texts]
    num_methods = 0
    for protocol in PROTOCOLS:
        async with protocol.connect(server) as client:
            options = {} if protocol is LibreTranslate else {"split": "sentences"}
            for name, method in client.methods.items():
                found = await answers(client, method, list(map("".join, texts)), options)
                assert found == [client.project(answer) for answer in wanted], (client.name, name)
                num_methods += 1
    assert num_methods >= 16


async def test_a_document_is_translated_alike_over_every_protocol(server: Server, sentences: list[str]) -> None:
    """Tags stay, and sentences are translated as alone."""
    single = [line for line in sentences if list(split_text(line)) == [(line, True)] and not set(line) & set("&<>")][:24]
    forms = "<p>{}</p>\n<!-- <p> --><P class=x>{}</P>", "<ul><li>{}<li><b>{}</b></ul>", "<td>{}<td>{}<br>", "{}<script>{}</script>"
    documents = [form.format(a, b) for form, a, b in zip(forms * 3, single[::2], single[1::2], strict=True)]
    options = {"markup": "html", "split": "sentences"}
    async with NativeGrpc.connect(server) as native:
        method = native.methods["Generate"]
        alone = {line: answer.texts[0] for line, answer in zip(single, await answers(native, method, single, {}), strict=True)}
        wanted = await answers(native, method, documents, options)
    for number, answer in enumerate(wanted):
        a, b = single[2 * number : 2 * number + 2]
        is_script = "script" in forms[number % 4]
        assert answer.texts == [forms[number % 4].format(alone[a], b if is_script else alone[b])]
    for protocol in PROTOCOLS:
        async with protocol.connect(server) as client:
            for name, method in client.methods.items():
                found = await answers(client, method, documents, options)
                assert found == [client.project(answer) for answer in wanted], (client.name, name)


def documented() -> dict[str, dict[str, str]]:
    """Return the table of docs/api.md: the status of each kind of error, by protocol."""
    section = (ROOT / "docs/api.md").read_text().partition("### Statuses by protocol\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    heads, _, *body = [[cell.strip().strip("`") for cell in line] for line in lines]
    return {name: {row[0]: row[heads.index(name)] for row in body} for name in heads[1:]}


STATUSES = documented()


async def refuse(client: ProtocolClient, kind: str, call: Any, reason: str = "") -> None:
    refused = await refusal(call)
    assert refused.status == STATUSES[client.name][kind], (kind, refused)
    assert refused.message and reason in refused.message, (kind, refused)
    assert not any(secret in refused.message for secret in SECRETS), (kind, refused)
    if kind in ("queue full", "draining"):
        assert refused.retry_after_seconds is not None and refused.retry_after_seconds > 0, (kind, refused)


NARROW_FLAGS = (
    *("--max-slots", "1", "--max-waiting-requests", "1"),
    *("--max-message-bytes", str(MAX_MESSAGE_BYTES), "--max-text-characters", "500"),
)


@pytest.fixture(scope="module")
def narrow(slow: Path) -> Iterator[Server]:
    with serving(slow, *NARROW_FLAGS, callers=CALLERS) as server:
        yield server


@asynccontextmanager
async def occupied(server: Server, num_requests: int) -> AsyncIterator[None]:
    async with NativeGrpc.connect(server, OTHER) as other:
        method, tasks = other.methods["GenerateStream"], list[asyncio.Task[Any]]()
        for number in range(num_requests):
            tasks.append(asyncio.create_task(method.call(query(method, "the neighbour's text"))))  # type: ignore[arg-type]
            await eventually(lambda: server.metric("dragoman_slots_in_use") == 1, "a request has the slot")
            await eventually(lambda n=number: server.metric("dragoman_num_requests_waiting") == n, "the others wait")
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@each_protocol
async def test_each_kind_of_error_has_its_protocols_status(narrow: Server, protocol: type[ProtocolClient]) -> None:
    """The statuses are those of the table in docs/api.md, which is read here."""

    def num_late() -> float:
        return narrow.metric("dragoman_requests_failed_total", code="DEADLINE_EXCEEDED")

    async with protocol.connect(narrow, TOKEN) as client:
        for method in client.methods.values():
            await refuse(client, "invalid", method.call(query(method, "a dog " * 100)))
            await refuse(client, "unknown model", method.call(query(method, model="nobody")))
            await refuse(client, "too large", method.call(query(method, "a" * (MAX_MESSAGE_BYTES + 1))))
            async with occupied(narrow, 2):
                await refuse(client, "queue full", method.call(query(method)))
            await asyncio.to_thread(narrow.wait_until_idle)
        await refuse(client, "not offered", client.call_unimplemented())
    async with protocol.connect(narrow, LATEST) as client:
        for method in client.methods.values():
            await refuse(client, "deadline", method.call(query(method)))
    for token, timeout, reason in (
        (TOKEN, 0.1, ""),
        (LATE, None, "the server's deadline (default_deadline_seconds of 0.1 seconds)"),
        (HURRIED, None, "the server's deadline (max_deadline_seconds of 0.1 seconds)"),
        (HURRIED, 50.0, "the server's deadline (max_deadline_seconds of 0.1 seconds)"),
    ):
        before = num_late()
        async with protocol.connect(narrow, token) as client:
            first = next(iter(client.methods.values()))
            await refuse(client, "deadline", first.call(query(first, timeout_seconds=timeout)), reason)
        await eventually(lambda before=before: num_late() > before, "the deadline is counted")
    await asyncio.to_thread(narrow.wait_until_idle)
    for token in ("", "wrong"):
        async with protocol.connect(narrow, token) as client:
            for method in client.methods.values():
                await refuse(client, "unauthenticated", method.call(query(method)))


async def test_deadlines_pass_while_an_engine_hangs(slow: Path) -> None:
    with serving(slow, "--watchdog-seconds", "3600", callers=CALLERS) as server, stopped(*server.engines()):
        for protocol in PROTOCOLS:
            async with protocol.connect(server, LATE) as client:
                calls = [refuse(client, "deadline", method.call(query(method))) for method in client.methods.values()]
                await asyncio.wait_for(asyncio.gather(*calls), 60)


async def test_a_drain_has_its_status_over_every_protocol(slow: Path) -> None:
    with serving(slow, *NARROW_FLAGS, callers=CALLERS) as server:
        async with occupied(server, 1):
            with stopped(*server.engines()):
                server.process.terminate()
                await asyncio.to_thread(server.wait_for, Event.DRAINING)
                for protocol in PROTOCOLS:
                    async with protocol.connect(server, TOKEN) as client:
                        for method in client.methods.values():
                            await refuse(client, "draining", method.call(query(method)))
        assert server.wait() == 0


@pytest.fixture(scope="module")
def roomy(slow: Path) -> Iterator[Server]:
    with serving(slow, "--max-slots", "2") as server:
        yield server


class Work(NamedTuple):
    """The work of an engine: its steps, and their rows, one for each sequence in a step."""

    steps: int
    rows: int

    @classmethod
    def of(cls, server: Server) -> "Work":
        return cls(*(int(server.metric(f"dragoman_{name}")) for name in ("step_duration_seconds_count", "engine_rows_total")))


@each_protocol
async def test_a_caller_that_leaves_frees_its_slot_within_two_steps(roomy: Server, protocol: type[ProtocolClient]) -> None:
    """The work for it is counted in rows of steps; the engine is stopped from before it leaves until the frontend knows.

    A neighbour, with a row in each step, makes the engine report every step. Reports of the last two steps may not have come.
    """
    [engine], num_tokens, most = roomy.engines(), 150, 2 + 2

    async def work_once_reported() -> Work:
        found = Work.of(roomy)
        while True:
            await asyncio.sleep(0.1)
            before, found = found, Work.of(roomy)
            if before == found:
                return found

    async def rows_after_leaving(client: ProtocolClient, neighbour: Method, method: Method) -> int:
        began = Work.of(roomy)
        staying = asyncio.create_task(neighbour.call(query(neighbour, options={"max_new_tokens": num_tokens})))  # type: ignore[arg-type]
        await eventually(lambda: roomy.metric("dragoman_slots_in_use") == 1, "the neighbour decodes")
        leaving = asyncio.create_task(method.call(query(method)))  # type: ignore[arg-type]
        await eventually(lambda: roomy.metric("dragoman_slots_in_use") == 2, "both decode")
        with stopped(engine):
            await eventually(lambda: is_stopped(engine), "the engine is stopped")
            left = await work_once_reported()
            leaving.cancel()
            await asyncio.to_thread(roomy.wait_for, Event.CALL, code="CANCELLED")
        [answer] = await staying
        if left.steps - began.steps >= num_tokens:  # the neighbour was no longer there
            return await rows_after_leaving(client, neighbour, method)
        assert answer.counts is not None and answer.counts[1] == num_tokens
        await eventually(lambda: roomy.metric("dragoman_slots_in_use") == 0, "no slot is in use")
        rows_of_neighbour = num_tokens - (left.steps - began.steps)
        return (await work_once_reported()).rows - left.rows - rows_of_neighbour

    async with protocol.connect(roomy) as client, NativeGrpc.connect(roomy) as neighbour:
        for name, method in client.methods.items():
            assert await rows_after_leaving(client, neighbour.methods["GenerateStream"], method) <= most, name
