"""Engines of real bundles proved by their samples, and every way in which one can be another than the one that was exported."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch

from dragoman.export.arguments import Shortlist
from dragoman.export.bundle import MANIFEST_FILE, SAMPLES_FILE, Bundle, hash_file
from dragoman.export.exporter import export_checkpoint
from dragoman.export.processor import Platform
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.generation import Language, Languages, Template
from dragoman.model.networks.transformer import Transformer
from dragoman.server.engine.messages import Answer, Finished, Request, Scored, ScoreRequest
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import Unavailable
from dragoman.server.proof import Proof, ProofFailed, prove
from dragoman.server.supervisor import RestartPolicy, SupervisedEngine
from tests.server.scripted import ScriptedEngine

ELSEWHERE = Platform("another", "1.0", "0123456789abcdef")
LONGEST = "sample 3 alone"  # the first of those that have as many tokens as the model takes


@contextlib.asynccontextmanager
async def engine_of(directory: Path, *, is_inline: bool = True, **fields: Any) -> AsyncIterator[SupervisedEngine]:
    """Run a bundle; in this process unless its own is wanted."""
    limits = {"max_waiting_requests": 100, "max_waiting_tokens": 1000, "prefill_tokens_per_step": 100}
    about = {"endpoint": "", "bundle": str(directory), "is_warmed_up": False, "log_level": "error", "log_format": "json"}
    settings = EngineSettings(**{"num_threads": 1, "max_slots": 4, **limits, **about, **fields})
    engine = SupervisedEngine(
        "tiny",
        settings,
        RestartPolicy(),
        is_inline=is_inline,
        on_statistics=lambda _: None,
        on_change=lambda: None,
        on_restart=lambda: None,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def proof_of(directory: Path, platform: Platform | None = None, **fields: Any) -> Proof:
    """Run a bundle and prove it, on the platform that its engine says or on another."""

    async def scenario() -> Proof:
        async with engine_of(directory, **fields) as engine:
            assert engine.ready is not None
            where = engine.ready.platform if platform is None else platform
            return await prove(Bundle.open(directory), engine, where, engine.device)

    return asyncio.run(scenario())


def reason_of(proving: Callable[[], Coroutine[Any, Any, Proof]]) -> str:
    with pytest.raises(ProofFailed) as caught:
        asyncio.run(proving())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refusal(directory: Path, platform: Platform | None = None) -> str:
    with pytest.raises(ProofFailed) as caught:
        proof_of(directory, platform)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def seal(directory: Path, *paths: str) -> None:
    """Let the manifest say what files now hold."""
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    for name in paths:
        file = directory / name
        manifest["files"][name] = {"size": file.stat().st_size, "sha256": hash_file(file)}
    path.write_text(json.dumps(manifest))


def edit_samples(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((directory / SAMPLES_FILE).read_text())
    change(content)
    (directory / SAMPLES_FILE).write_text(json.dumps(content))
    seal(directory, SAMPLES_FILE)


def weights_of(directory: Path, graph: str, ending: str) -> tuple[Path, int, int]:
    """Return where a weight of a graph lies: its file, its first byte, its bytes."""
    model = onnx.load(directory / f"{graph}.onnx", load_external_data=False)
    tensors = {tensor.name: {item.key: item.value for item in tensor.external_data} for tensor in model.graph.initializer}
    place = next(place for name, place in sorted(tensors.items()) if name.endswith(ending) and place)
    return directory / place["location"], int(place["offset"]), int(place["length"])


@pytest.fixture(scope="session")
def other_checkpoint(tiny_checkpoint: Checkpoint) -> Checkpoint:
    """Return a model of the same dimensions with other weights."""
    model = Transformer(tiny_checkpoint.model.config).eval()
    model.load_state_dict(tiny_checkpoint.model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return replace(tiny_checkpoint, model=model)


@pytest.fixture(scope="session")
def other_bundle(other_checkpoint: Checkpoint, shelf: Any) -> Path:
    def make(folder: Path) -> None:
        other_checkpoint.save(folder / "checkpoint")
        export_checkpoint(folder / "checkpoint", folder / "bundle")

    return Path(shelf.get("tiny-other", make) / "bundle")


@pytest.mark.parametrize("fields", [{"is_inline": False, "num_threads": 2}, {"max_slots": 1}, {"max_waiting_requests": 1}])
def test_an_intact_engine_gives_the_bits_of_export(tiny_bundle: Path, fields: dict[str, Any]) -> None:
    """Also where one slot or one place in the queue is all there is: in its own process and in batches of another size."""
    proof = proof_of(tiny_bundle, **fields)
    assert proof.is_proved and proof.is_exact
    assert (proof.found.num_answers, proof.found.num_pairs, proof.found.max_difference) == (9, 2, 0.0)
    assert proof.found.num_tokens == 9 * 20


def test_elsewhere_a_tolerance_is_asked_for(tiny_bundle: Path) -> None:
    proof = proof_of(tiny_bundle, ELSEWHERE)
    assert proof.is_proved and not proof.is_exact
    assert proof.tolerance == 2e-4 and proof.found.num_tokens == 9 * 20


@pytest.mark.parametrize("options", [{"precision": "int8", "cache_precision": "int8"}, {"precision": "fp16"}])
def test_other_precisions_give_the_bits_of_export_too(tiny_checkpoint: Checkpoint, tmp_path: Path, options: dict[str, Any]) -> None:
    languages = Languages(
        source=[Language(code="en", source_prefix=[279])],
        target=[Language(code="de", target_prefix=[278, 17]), Language(code="fi", decoder_start_id=7)],
    )
    replace(tiny_checkpoint, template=Template(source_suffix=[5]), languages=languages).save(tmp_path / "checkpoint")
    shortlist = Shortlist(["a dog runs over the grass"])
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", shortlist=shortlist, **options)
    proof = proof_of(tmp_path / "bundle", num_threads=2)
    assert proof.is_exact and proof.found.num_answers == 9 and proof.found.num_pairs == 2
    assert proof_of(tmp_path / "bundle", ELSEWHERE).found.max_difference == 0.0


@pytest.mark.parametrize(("platform", "bit"), [(None, 4), (ELSEWHERE, 30)])
def test_a_flipped_bit_of_a_weight_is_found(bundle_copy: Path, platform: Platform | None, bit: int) -> None:
    """On the same platform one of the mantissa's last; elsewhere one that matters."""
    path, offset, length = weights_of(bundle_copy, "encoder", "layers.1.feed_forward.inner.weight")
    content = np.fromfile(path, np.uint8)
    content[offset : offset + length].view(np.uint32)[length // 8] ^= 1 << bit
    content.tofile(path)
    seal(bundle_copy, path.name)
    assert "sample " in refusal(bundle_copy, platform)


@pytest.mark.parametrize("platform", [None, ELSEWHERE])
def test_another_models_weights_are_found(bundle_copy: Path, other_bundle: Path, platform: Platform | None) -> None:
    for name in ("encoder.weights", "decoder.weights"):
        shutil.copyfile(other_bundle / name, bundle_copy / name)
    seal(bundle_copy, "encoder.weights", "decoder.weights")
    assert refusal(bundle_copy, platform).startswith(f"{LONGEST}, token 1: ")


@pytest.mark.parametrize("platform", [None, ELSEWHERE])
def test_another_models_samples_are_found(bundle_copy: Path, other_bundle: Path, platform: Platform | None) -> None:
    shutil.copyfile(other_bundle / SAMPLES_FILE, bundle_copy / SAMPLES_FILE)
    with pytest.raises(Exception, match=f"{SAMPLES_FILE}: .*, but {MANIFEST_FILE} says"):
        Bundle.open(bundle_copy)
    seal(bundle_copy, SAMPLES_FILE)
    assert refusal(bundle_copy, platform).startswith(f"{LONGEST}, token 1: ")


def test_a_wrong_token_is_found(bundle_copy: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        sample = content["samples"][1]
        sample["ids"][5] = sample["candidates"][5][0][0] = 77

    edit_samples(bundle_copy, change)
    assert refusal(bundle_copy).startswith("sample 2, token 6: ") and "instead of 77 (" in refusal(bundle_copy, ELSEWHERE)


def test_a_wrong_score_is_found(bundle_copy: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["pairs"][1]["log_probs"][3] -= 0.001

    edit_samples(bundle_copy, change)
    assert refusal(bundle_copy, ELSEWHERE).startswith("pair 2, token 4: ")


def test_scores_of_a_large_bundle_need_not_have_the_same_bits(bundle_copy: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["pairs"][1]["log_probs"][3] -= 1e-5

    edit_samples(bundle_copy, change)
    assert refusal(bundle_copy).startswith("pair 2, token 4: ")
    edit_samples(bundle_copy, lambda content: content.update(are_scores_exact=False))
    assert proof_of(bundle_copy).is_exact


def test_weights_that_are_no_numbers_are_found(bundle_copy: Path) -> None:
    path, offset, length = weights_of(bundle_copy, "encoder", "layers.1.feed_forward.inner.weight")
    content = np.fromfile(path, np.uint8)
    content[offset : offset + length].view(np.float32)[:] = math.nan
    content.tofile(path)
    seal(bundle_copy, path.name)
    assert LONGEST in refusal(bundle_copy) and "nan" in refusal(bundle_copy, ELSEWHERE).lower()


def test_samples_that_cannot_be_read_fail_by_name(bundle_copy: Path, tiny_bundle: Path) -> None:
    edit_samples(bundle_copy, lambda content: content["samples"][0].update(source=[280]))
    assert f"{SAMPLES_FILE}: not sample answers: the source of sample 1 has token 280" in refusal(bundle_copy)


def without_samples(directory: Path) -> Bundle:
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    del manifest["files"][SAMPLES_FILE]
    path.write_text(json.dumps(manifest))
    return Bundle.open(directory)


def test_without_samples_finite_numbers_are_all_that_is_asked_for(bundle_copy: Path) -> None:
    without_samples(bundle_copy)
    proof = proof_of(bundle_copy)
    assert not proof.is_proved and not proof.is_exact
    assert (proof.found.num_answers, proof.found.num_tokens, proof.found.num_pairs) == (2, 16, 1)


def test_an_engine_that_dies_fails_by_name(tiny_bundle: Path) -> None:
    async def proving() -> Proof:
        async with engine_of(tiny_bundle, is_inline=False) as engine:
            assert engine.process_id is not None
            os.kill(engine.process_id, signal.SIGSTOP)  # or it might answer, or be seen to be dead, before it is asked
            proof = asyncio.create_task(prove(Bundle.open(tiny_bundle), engine, ELSEWHERE))
            while not engine.ready_client().num_outstanding:
                await asyncio.sleep(0.001)
            os.kill(engine.process_id, signal.SIGKILL)
            return await proof

    assert reason_of(proving) == f"{LONGEST} is not answered: the engine of model 'tiny' ended"


def test_an_engine_that_hangs_fails_by_name_and_what_was_asked_is_cancelled(tiny_bundle: Path) -> None:
    engine = ScriptedEngine([5])
    engine.hold()
    found = reason_of(lambda: prove(Bundle.open(tiny_bundle), engine, ELSEWHERE, seconds=0.05))
    assert found == f"{LONGEST} is not answered within 0.05 s" and engine.cancelled == [1]


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
def test_an_engine_that_gives_no_answers_fails_by_name(bundle_copy: Path, make: Callable[[Request], Finished], reason: str) -> None:
    bundle = without_samples(bundle_copy)
    assert reason_of(lambda: prove(bundle, Answering(make), ELSEWHERE)).endswith(reason)


def test_one_that_is_lost_on_the_way_fails_by_name(tiny_bundle: Path) -> None:
    engine = ScriptedEngine([5])
    engine.error = Unavailable("the engine is gone")
    found = reason_of(lambda: prove(Bundle.open(tiny_bundle), engine, ELSEWHERE))
    assert found == f"{LONGEST} is not answered: the engine is gone"


def test_the_device_decides_whether_bits_are_asked_for(tiny_bundle: Path) -> None:
    async def proving() -> Proof:
        async with engine_of(tiny_bundle) as engine:
            assert engine.ready is not None
            return await prove(Bundle.open(tiny_bundle), engine, engine.ready.platform, "cuda:0 (a device)")

    assert not asyncio.run(proving()).is_exact
