"""Every face of the real server: the same answers, the status of its protocol for each kind of error, slots that are free at once.

By default 500 sentences go through every way of every face as they are, and some of them with each of the options. With
`TEST_LONG=1` all of them do with all options.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.corpus import read_lines
from dragoman.model.generation import Defaults, Language, Languages
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.faces.http.libre.pieces import pieces_of
from tests.shelf import Shelf
from tests.system.harness.grpc_client import NativeGrpc
from tests.system.harness.protocol import Answer, ProtocolClient, Query, Refused
from tests.system.harness.protocols import PROTOCOLS

ROOT = Path(__file__).resolve().parents[2]
NUM_SENTENCES = 500
NUM_WITH_OPTIONS = NUM_SENTENCES if os.environ.get("TEST_LONG") else 10
AT_ONCE = 48
OPTIONS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4},
    "n-best": {"num_beams": 3, "num_return_sequences": 3},
    "length penalty": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6},
    "early stopping": {"num_beams": 3, "early_stopping": True, "length_penalty": -0.3},
    "sampling": {"do_sample": True, "seed": 2**40 + 1, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "samples": {"do_sample": True, "seed": 3, "num_return_sequences": 3},
    "prefix": {"forced_prefix": "Ein"},
    "max tokens": {"max_new_tokens": 5},
    "min tokens": {"min_new_tokens": 12, "max_new_tokens": 16},
    "log-probabilities": {"return_log_probs": True},
    "likeliest tokens": {"num_beams": 2, "num_return_sequences": 2, "top_log_probs": 3, "max_new_tokens": 60},
    "alternatives": {"return_alternatives": True, "num_return_sequences": 3, "forced_prefix": "Ein"},
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "suppressed tokens": {"suppressed_tokens": [5, 6, 7]},
    "truncation and priority": {"truncate": True, "priority": 3},
    "languages": {"source_language": "en", "target_language": "de"},
}
TOKEN, OTHER, HURRIED = "web-token", "other-token", "hurried-token"
# The last one's deadline passes before there can be an answer.
CALLERS = f"""
[callers.web]
token = "{TOKEN}"
[callers.other]
token = "{OTHER}"
[callers.hurried]
token = "{HURRIED}"
default_deadline_seconds = 0.0001
"""
MAX_MESSAGE_BYTES = 64 * 2**10
# What no answer to one caller may hold.
SECRETS = ("Traceback", ".py", str(ROOT), OTHER, "the neighbour's text")

pytestmark = pytest.mark.e2e
each_protocol = pytest.mark.parametrize("face", PROTOCOLS, ids=lambda face: face.name)


@pytest.fixture(scope="session")
def sentences(request: pytest.FixtureRequest, captions: list[str]) -> list[str]:
    """500 sentences, each of which is one for LibreTranslate's API too: of the corpus where that is there, else made up."""
    try:
        lines = read_lines(request.getfixturevalue("multi30k") / "test_2016_flickr.en.gz")
    except pytest.skip.Exception:
        lines = [caption.removesuffix(".") + end for end in (".", " at night.", ", in the morning.") for caption in captions]
    whole = [line for line in lines if list(pieces_of(line)) == [(line, True)]]
    assert len(whole) >= NUM_SENTENCES
    return whole[:NUM_SENTENCES]


@pytest.fixture(scope="session")
def slow(shelf: Shelf) -> Path:
    """Folder of the bundle of a model that tells languages, never ends an answer by itself, and takes its time for each step."""
    return shelf.get("slow", make_slow) / "bundles"


def make_slow(folder: Path) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        source_vocab_size=280,
        target_vocab_size=280,
        d_model=512,
        num_encoder_layers=1,
        num_decoder_layers=6,
        encoder_ffn_dim=512,
        decoder_ffn_dim=2048,
        max_source_positions=64,
        max_target_positions=1000,
        has_output_bias=True,
    )
    model = Transformer(config).eval()
    assert model.decoder.output_bias is not None
    model.decoder.output_bias.data[config.eos_id] = -60
    tokenizer = ByteLevelTokenizer.train(["a dog runs over the grass"], 280)
    languages = Languages(source=[Language(code="en")], target=[Language(code="de")], default_source="en", default_target="de")
    tokenizers = Tokenizers.shared(tokenizer)
    checkpoint = Checkpoint("alpha", model, tokenizers, languages=languages, defaults=Defaults(max_new_tokens=900))
    checkpoint.save(folder / "checkpoints" / "alpha")
    export_checkpoint(folder / "checkpoints" / "alpha", folder / "bundles" / "alpha")


@pytest.fixture(scope="module")
def narrow(serve: Callable[..., Any], slow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with one slot, one place to wait, small messages, and callers."""
    with narrow_server(serve, slow, tmp_path_factory.mktemp("callers")) as server:
        yield server
        assert server.terminate() == 0


def narrow_server(serve: Callable[..., Any], bundles: Path, folder: Path) -> Any:
    (folder / "callers.toml").write_text(CALLERS)
    limits = ("--max-slots", "1", "--max-waiting-requests", "1", "--max-message-bytes", str(MAX_MESSAGE_BYTES))
    return serve(bundles, *limits, "--auth-tokens-file", str(folder / "callers.toml"))


async def eventually(condition: Callable[[], bool]) -> None:
    """Return once a condition holds, which is looked at on a thread."""
    end = time.monotonic() + 60
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end


async def answers(face: ProtocolClient, way: str, texts: list[str], options: dict[str, Any]) -> list[Answer]:
    """Return what is told of texts, many of which are asked at once."""
    limit, (ask, num_texts) = asyncio.Semaphore(AT_ONCE), face.methods[way]

    async def of(group: list[str]) -> list[Answer]:
        async with limit:
            return await ask(Query(group, options))

    groups = [texts[start : start + num_texts] for start in range(0, len(texts), num_texts)]
    return [told for group in await asyncio.gather(*map(of, groups)) for told in group]


def check_all_ways(server: Any, texts: list[str], options: dict[str, Any]) -> int:
    """Ask everywhere; return in how many ways."""

    async def run() -> int:
        num_ways = 0
        async with NativeGrpc.connect(server) as native:
            expected = await answers(native, "Generate", texts, options)
        assert len(expected) == len(texts) and all(told.texts[0] for told in expected)
        for kind in PROTOCOLS:
            async with kind.connect(server) as face:
                for way in face.methods:
                    if face.supports(way, options):
                        found = await answers(face, way, texts, options)
                        for text, wanted, told in zip(texts, expected, found, strict=True):
                            assert told == face.project(wanted), (face.name, way, text)
                        num_ways += 1
        return num_ways

    return asyncio.run(run())


def test_sentences_have_one_answer_through_every_face(shared_server: Any, sentences: list[str]) -> None:
    assert check_all_ways(shared_server, sentences, {}) >= 16


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_mean_the_same_through_every_face(shared_server: Any, sentences: list[str], options: dict[str, Any]) -> None:
    """Scores and log-probabilities to the last bit."""
    step = NUM_SENTENCES // NUM_WITH_OPTIONS
    assert check_all_ways(shared_server, sentences[::step], options) >= 14


def documented() -> dict[str, dict[str, str]]:
    """Return the table of docs/http.md: the status of each kind of error, by face."""
    section = (ROOT / "docs/http.md").read_text().partition("## The same error everywhere\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    [heads, _, *body] = rows
    return {name: {row[0]: row[heads.index(name)] for row in body} for name in heads[1:]}


STATUSES = documented()


def check_refusal(face: ProtocolClient, kind: str, refused: Refused) -> None:
    assert refused.status == STATUSES[face.name][kind], (kind, refused)
    assert refused.message and not any(secret in refused.message for secret in SECRETS), (kind, refused)
    if kind in ("queue full", "draining"):
        assert refused.retry_after_seconds is not None and refused.retry_after_seconds > 0, (kind, refused)


def asked(way: Any, text: str = "a dog", **more: Any) -> Query:
    return Query(**{"texts": [text] * way.num_texts, "model": "alpha"} | more)


@asynccontextmanager
async def held(server: Any, num_requests: int) -> AsyncIterator[None]:
    """Have so many requests of another caller's under way, one of which has the slot."""
    async with NativeGrpc.connect(server, OTHER) as other:
        way = other.methods["GenerateStream"]
        tasks = []
        for _ in range(num_requests):
            tasks.append(asyncio.create_task(way.ask(asked(way, "the neighbour's text"))))
            await eventually(lambda: server.metric("dragoman_slots_in_use") == 1)
            await eventually(lambda: server.metric("dragoman_num_requests_waiting") == len(tasks) - 1)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: server.metric("dragoman_num_requests_waiting") == server.metric("dragoman_slots_in_use") == 0)


@each_protocol
def test_each_kind_of_error_has_its_protocols_status(narrow: Any, face: type[ProtocolClient]) -> None:
    """What the statuses are, docs/http.md says, too: its table is read here."""

    async def refusal(caller: ProtocolClient, way: str, kind: str, **more: Any) -> None:
        with pytest.raises(Refused) as caught:
            await caller.methods[way].ask(asked(caller.methods[way], **more))
        check_refusal(caller, kind, caught.value)

    async def run() -> None:
        async with face.connect(narrow, TOKEN) as caller:
            for way in caller.methods:
                await refusal(caller, way, "invalid", text="a dog " * 100)
                await refusal(caller, way, "unknown model", model="nobody")
                await refusal(caller, way, "too large", text="a" * (MAX_MESSAGE_BYTES + 1))
                async with held(narrow, 2):
                    await refusal(caller, way, "queue full")
            with pytest.raises(Refused) as caught:
                await caller.call_unimplemented()
            check_refusal(caller, "not offered", caught.value)
        async with face.connect(narrow, HURRIED) as hurried:
            for way in hurried.methods:
                await refusal(hurried, way, "deadline", texts=["a dog"])
        for token in ("", "wrong"):
            async with face.connect(narrow, token) as nobody:
                for way in nobody.methods:
                    await refusal(nobody, way, "unauthenticated")

    asyncio.run(run())


def test_a_drain_has_its_status_on_every_face(serve: Callable[..., Any], slow: Path, tmp_path: Path) -> None:
    """Each caller is connected before; the engine stands still meanwhile, so that the drain does not end."""

    async def run(server: Any, engine: int) -> None:
        for kind in PROTOCOLS:
            async with kind.connect(server, TOKEN) as caller:
                assert caller.methods
        async with held(server, 1):
            os.kill(engine, signal.SIGSTOP)
            try:
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(server.wait_for, "draining")
                for kind in PROTOCOLS:
                    async with kind.connect(server, TOKEN) as caller:
                        for way in caller.methods.values():
                            with pytest.raises(Refused) as caught:
                                await way.ask(asked(way))
                            check_refusal(caller, "draining", caught.value)
            finally:
                os.kill(engine, signal.SIGCONT)

    with narrow_server(serve, slow, tmp_path) as server:
        asyncio.run(run(server, engine_of(server)))
        assert server.wait() == 0


def engine_of(server: Any) -> int:
    [engine] = [event["engine_pid"] for event in server.events if event["event"] == "engine ready"]
    return int(engine)


def is_stopped(pid: int) -> bool:
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").glob("*/stat"))


@pytest.fixture(scope="module")
def roomy(serve: Callable[..., Any], slow: Path) -> Iterator[Any]:
    """A server with two slots."""
    with serve(slow, "--max-slots", "2") as server:
        yield server
        assert server.terminate() == 0


class Done(NamedTuple):
    """What an engine has done.

    Attributes:
        steps: So many.
        rows: Of all of them together: one for each sequence that was in a step.
    """

    steps: int
    rows: int

    @classmethod
    def by(cls, server: Any) -> "Done":
        found = {}
        for line in server.metrics_text().splitlines():
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] = value
        return cls(*(int(float(found[f"dragoman_engine_{name}_total"])) for name in ("steps", "rows")))


@each_protocol
def test_who_leaves_frees_the_slot_within_two_steps(roomy: Any, face: type[ProtocolClient]) -> None:
    """What the engine does for them is counted in rows of steps: it stands still while they leave, until the front end knows.

    A neighbour streams so many tokens meanwhile that its engine reports every step, and has a row in each. Of the last step before
    the engine stood still, the front end may not have heard: it is one more.
    """
    engine, num_tokens, most = engine_of(roomy), 100, 2 + 1

    async def settled() -> Done:
        """Return what the stopped engine has done, once the front end has read all its reports."""
        found = Done.by(roomy)
        while True:
            await asyncio.sleep(0.2)
            before, found = found, Done.by(roomy)
            if before == found:
                return found

    async def rows_for_somebody_gone(caller: ProtocolClient, neighbour: Any, way: Any) -> int:
        began = Done.by(roomy)
        staying = asyncio.create_task(neighbour.ask(asked(neighbour, options={"max_new_tokens": num_tokens})))
        await eventually(lambda: roomy.metric("dragoman_slots_in_use") == 1)
        leaving = asyncio.create_task(way.ask(asked(way)))
        await eventually(lambda: roomy.metric("dragoman_slots_in_use") == 2)
        os.kill(engine, signal.SIGSTOP)
        try:
            await eventually(lambda: is_stopped(engine))
            left = await settled()
            leaving.cancel()
            await asyncio.to_thread(roomy.wait_for, "call", code="CANCELLED")
        finally:
            os.kill(engine, signal.SIGCONT)
        assert left.steps - began.steps < num_tokens, "the neighbour was still there"
        [told] = await staying
        assert told.counts is not None and told.counts[1] == num_tokens
        await eventually(lambda: roomy.metric("dragoman_engine_slots_in_use") == 0)
        rows_of_neighbour = num_tokens - (left.steps - began.steps)
        return Done.by(roomy).rows - left.rows - rows_of_neighbour

    async def run() -> None:
        async with face.connect(roomy) as caller, NativeGrpc.connect(roomy) as neighbour:
            for name, way in caller.methods.items():
                assert await rows_for_somebody_gone(caller, neighbour.methods["GenerateStream"], way) <= most, name

    asyncio.run(run())
