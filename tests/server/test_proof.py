"""Self-tests of engines by the samples of their bundles, and every way in which an engine can differ from the exported one."""

import contextlib
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.export.arguments import Shortlist
from dragoman.export.bundle import Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.export.manifest import MANIFEST_FILE, SAMPLES_FILE
from dragoman.export.processor import Platform
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.generation import Language, Languages, Template
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine.messages import Answer, Finished, Request, Scored, ScoreRequest
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import Unavailable
from dragoman.server.models.self_test import Proof, ProofFailed, prove
from dragoman.server.workers.pool import ReplicaPool
from dragoman.server.workers.supervisor import RestartPolicy
from tests.export.conftest import edit, seal
from tests.server.scripted import ScriptedEngine

ELSEWHERE = Platform("another", "1.0", "0123456789abcdef")
LONGEST = "sample 3 alone"  # the first of those that have as many tokens as the model takes


@contextlib.asynccontextmanager
async def engine_of(directory: Path, **fields: Any) -> AsyncIterator[ReplicaPool]:
    """Run a bundle."""
    limits = {"max_waiting_requests": 100, "max_waiting_tokens": 1000}
    about = {"endpoint": "", "bundle": str(directory), "is_warmed_up": False, "log_level": "error", "log_format": "json"}
    settings = EngineSettings(**{"num_threads": 1, "max_slots": 4, **limits, **about, **fields})
    nothing: Any = {"on_change": lambda: None, **dict.fromkeys(("on_statistics", "on_engine_change", "on_restart"), lambda _: None)}
    engine = ReplicaPool("tiny", [settings], RestartPolicy(), on_engine_statistics=lambda *_: None, **nothing)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def proof_of(directory: Path, platform: Platform | None = None, device: str = "", **fields: Any) -> Proof:
    """Run a bundle and prove it, on the platform that its engine says or on another."""
    async with engine_of(directory, **fields) as engine:
        assert engine.ready is not None
        where = engine.ready.platform if platform is None else platform
        bundle = Bundle.open(directory)
        return await prove(bundle, bundle.tokenizers(), engine, where, device or engine.device)


async def reason_of(proving: Coroutine[Any, Any, Proof]) -> str:
    with pytest.raises(ProofFailed) as caught:
        await proving
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_samples(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / SAMPLES_FILE
    edit(path, change)
    seal(directory, SAMPLES_FILE)


@pytest.mark.parametrize("fields", [{"num_threads": 2}, {"max_slots": 1}, {"max_waiting_requests": 1}])
async def test_intact_engine_gives_the_bits_of_export(tiny_bundle: Path, fields: dict[str, Any]) -> None:
    """Also in batches of another size, and where one slot or one place in the queue is all there is."""
    proof = await proof_of(tiny_bundle, **fields)
    assert proof.is_proved and proof.is_exact
    assert (proof.found.num_answers, proof.found.num_pairs, proof.found.max_difference) == (9, 2, 0.0)
    assert proof.found.num_tokens == 9 * 20


async def test_on_another_platform_or_device_a_tolerance_is_allowed(tiny_bundle: Path) -> None:
    proof = await proof_of(tiny_bundle, ELSEWHERE)
    assert proof.is_proved and not proof.is_exact
    assert proof.tolerance == 2e-4 and proof.found.num_tokens == 9 * 20
    assert not (await proof_of(tiny_bundle, device="cuda:0 (a device)")).is_exact


@pytest.mark.parametrize("options", [{"precision": "int8"}, {"precision": "fp16"}])
async def test_other_precisions_give_the_bits_of_export_too(
    tiny_checkpoint: Checkpoint, tmp_path: Path, options: dict[str, Any]
) -> None:
    languages = Languages(
        source=[Language(code="en", source_prefix=[279])],
        target=[Language(code="de", target_prefix=[278, 17]), Language(code="fi", decoder_start_id=7)],
    )
    replace(tiny_checkpoint, template=Template(source_suffix=[5]), languages=languages).save(tmp_path / "checkpoint")
    shortlist = Shortlist(["a dog runs over the grass"])
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", shortlist=shortlist, **options)
    proof = await proof_of(tmp_path / "bundle", num_threads=2)
    assert proof.is_exact and proof.found.num_answers == 9 and proof.found.num_pairs == 2
    assert (await proof_of(tmp_path / "bundle", ELSEWHERE)).found.max_difference == 0.0


def change_token(content: dict[str, Any]) -> None:
    content["samples"][1]["ids"][5] = content["samples"][1]["candidates"][5][0][0] = 77


def change_first(content: dict[str, Any]) -> None:
    for sample in content["samples"]:
        sample["ids"][0] = sample["candidates"][0][0][0] = 77


def change_score(by: float) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["pairs"][1]["log_probs"][3] -= by

    return change


@pytest.mark.parametrize(
    ("change", "platform", "reason"),
    [
        (change_first, None, rf"^{LONGEST}, token 1: "),
        (change_first, ELSEWHERE, rf"^{LONGEST}, token 1: "),
        (change_token, None, r"^sample 2, token 6: "),
        (change_token, ELSEWHERE, r"^sample 2, token 6: .*instead of 77 \("),
        (change_score(0.001), ELSEWHERE, r"^pair 2, token 4: "),
        (change_score(1e-5), None, r"^pair 2, token 4: "),
        (
            lambda content: content["samples"][0].update(source=[280]),
            *(None, f"{SAMPLES_FILE}: not sample answers: the source of sample 1 has token 280"),
        ),
    ],
)
async def test_engine_that_answers_otherwise_than_the_samples_is_found(
    bundle_copy: Path, change: Callable[[dict[str, Any]], object], platform: Platform | None, reason: str
) -> None:
    edit_samples(bundle_copy, change)
    assert re.search(reason, await reason_of(proof_of(bundle_copy, platform)))


def without_samples(directory: Path) -> Bundle:
    edit(directory / MANIFEST_FILE, lambda manifest: manifest["files"].pop(SAMPLES_FILE))
    return Bundle.open(directory)


async def test_another_tokeniser_is_refused(bundle_copy: Path) -> None:
    """One that fits the model, with the checksum of its file in the manifest."""
    Tokenizers.shared(ByteLevelTokenizer.train(["of another text " * 100], 270)).save(bundle_copy / "tokenizer")
    seal(bundle_copy, "tokenizer/tokenizer.json")
    assert (await reason_of(proof_of(bundle_copy))).endswith("than at export")


async def test_without_samples_only_finite_numbers_are_required(bundle_copy: Path) -> None:
    without_samples(bundle_copy)
    proof = await proof_of(bundle_copy)
    assert not proof.is_proved and not proof.is_exact
    assert (proof.found.num_answers, proof.found.num_tokens, proof.found.num_pairs) == (2, 16, 1)


async def test_engine_that_hangs_or_is_lost_is_named(tiny_bundle: Path) -> None:
    engine, bundle = ScriptedEngine([5]), Bundle.open(tiny_bundle)
    engine.hold()
    found = await reason_of(prove(bundle, bundle.tokenizers(), engine, ELSEWHERE, seconds=0.05))  # type: ignore[arg-type]
    assert found == f"{LONGEST} is not answered within 0.05 s" and engine.cancelled == [1]
    engine = ScriptedEngine([5])
    engine.error = Unavailable("the engine is gone")
    found = await reason_of(prove(bundle, bundle.tokenizers(), engine, ELSEWHERE))  # type: ignore[arg-type]
    assert found == f"{LONGEST} is not answered: the engine is gone"


class Answering(ScriptedEngine):
    """Answers every request with what a function makes of it."""

    def __init__(self, make: Callable[[Request], Finished]) -> None:
        super().__init__([5])
        self._make = make

    async def generate(self, request: Request) -> Finished:
        self.requests.append(request)
        return self._make(request)

    async def score(self, pair: ScoreRequest) -> Scored:
        return Scored(pair.id, "eos", [-1.0] * len(pair.target_ids), b"", 0.0)


def finished(request: Request, reason: Any = "length", log_prob: float = -1.0, **fields: Any) -> Finished:
    answers = [Answer([5] * request.max_new_tokens, [log_prob] * request.max_new_tokens, 0.0, "length")]
    end = Finished(request.id, reason, answers if reason == "length" else [], 0, None, 0.0, None, 0.0)
    return msgspec.structs.replace(end, **fields)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda request: finished(request, log_prob=math.nan), "1, token 1: the log-probability is nan"),
        (lambda request: finished(request, "step_failed", incident="abc"), "1 ended as step_failed, incident abc"),
        (lambda request: finished(request, "lost"), "1 ended as lost"),
        (lambda request: finished(request, answers=[]), "1 has 0 answers"),
        (lambda request: finished(request, "queue_full"), "no probe finds a place in the engine's queue"),
    ],
)
async def test_engine_without_answers_is_named(bundle_copy: Path, make: Callable[[Request], Finished], reason: str) -> None:
    bundle = without_samples(bundle_copy)
    assert (await reason_of(prove(bundle, bundle.tokenizers(), Answering(make), ELSEWHERE))).endswith(reason)  # type: ignore[arg-type]
