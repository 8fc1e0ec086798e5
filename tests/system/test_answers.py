"""What is served is the PyTorch model's output, whatever else is being served."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.client.sync import Client
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_parallel
from dragoman.model.decode import greedy_search
from dragoman.model.quality import score

ROOT = Path(__file__).resolve().parents[2]
MARGIN = 1e-4

pytestmark = pytest.mark.e2e


def eager_answers(name: str, texts: list[str]) -> tuple[list[list[int]], list[str]]:
    """Greedy answers of the shipped checkpoint in eager PyTorch: ids and texts."""
    checkpoint = Checkpoint.load(ROOT / "model/pretrained" / name)
    sources = checkpoint.tokenizers.source.encode_batch(texts)
    order = sorted(range(len(texts)), key=lambda i: len(sources[i]))
    ids: list[list[int]] = [[]] * len(texts)
    for start in range(0, len(order), 64):
        batch = order[start : start + 64]
        for i, hypothesis in zip(batch, greedy_search(checkpoint.model, [sources[i] for i in batch], 256), strict=True):
            ids[i] = hypothesis.ids
    return ids, [checkpoint.tokenizers.target.decode(row) for row in ids]


def margin_where_they_part(name: str, text: str, ours: list[int], theirs: list[int]) -> float:
    """How much likelier, in nats, eager PyTorch finds its own choice than ours at the first token that differs."""
    checkpoint = Checkpoint.load(ROOT / "model/pretrained" / name)
    model, eos = checkpoint.model, checkpoint.model.config.eos_id
    pairs = zip([*ours, eos], [*theirs, eos], strict=False)
    common = next(i for i, (mine, yours) in enumerate(pairs) if mine != yours)
    source = [*checkpoint.tokenizers.source.encode(text), eos]
    prefix = [model.config.decoder_start_id, *theirs[:common]]
    with torch.inference_mode():
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([prefix]))[0, -1]
    return float(logits[[*theirs, eos][common]] - logits[[*ours, eos][common]])


def check_against_eager(name: str, texts: list[str], served: list[tuple[int, ...]]) -> None:
    expected, _ = eager_answers(name, texts)
    for text, ours, theirs in zip(texts, served, expected, strict=True):
        if list(ours) != theirs:
            assert margin_where_they_part(name, text, list(ours), theirs) < MARGIN, text


@pytest.mark.parametrize("model", ["en-de", "en-fr"])
def test_answers_are_the_eager_models_at_any_concurrency(shared_server: Any, captions: list[str], model: str) -> None:
    with Client(shared_server.address) as client:
        together = [result.tokens for result in client.generate_many(captions, concurrency=64, model=model)]
        alone = [result.tokens for result in client.generate_many(captions, concurrency=1, model=model)]
    assert together == alone
    check_against_eager(model, captions, together)


@pytest.mark.parametrize("model", ["en-de", "en-fr"])
def test_the_test_set_is_translated_as_in_pytorch(shared_server: Any, multi30k: Path, model: str) -> None:
    """All 1,000 sentences of test_2016: the same tokens at concurrency 64 and 1, those of eager PyTorch, hence its BLEU."""
    files = (multi30k / f"test_2016_flickr.{language}.gz" for language in ("en", model[-2:]))
    texts, references = read_parallel(*files)
    with Client(shared_server.address) as client:
        together = list(client.generate_many(texts, concurrency=64, model=model))
        alone = list(client.generate_many(texts, concurrency=1, model=model))
    assert len(together) == 1000
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    check_against_eager(model, texts, [result.tokens for result in together])
    served = score([result.text for result in together], references)
    eager = score(eager_answers(model, texts)[1], references)
    assert served.bleu == pytest.approx(eager.bleu, abs=0.05)
    assert served.chrf == pytest.approx(eager.chrf, abs=0.05)


def test_streamed_pieces_are_the_unary_answer(shared_server: Any, captions: list[str]) -> None:
    with Client(shared_server.address) as client:
        for text in captions[:20]:
            whole = client.generate(text, model="en-fr")
            with client.stream(text, model="en-fr") as stream:
                pieces = list(stream)
            assert "".join(piece.text for piece in pieces) == whole.text
            assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens
            assert len(pieces) > 2, "text came before the end"


@pytest.mark.parametrize(
    "sample", ["Ein 🐕 läuft durch den Schnee.", "  two  spaces ", "</s> <pad> <s>", "e\u0301té \u200d \x00 ﷽"]
)
def test_any_text_is_answered(shared_server: Any, sample: str) -> None:
    with Client(shared_server.address) as client:
        result = client.generate(sample, model="en-de", max_new_tokens=20)
    assert result.finish_reason in ("eos", "length") and result.usage.generated_tokens <= 20


def test_evaluate_gives_the_same_scores_from_checkpoint_bundle_and_server(
    shared_server: Any, bundles: Path, captions: list[str], tmp_path: Path
) -> None:
    source, reference = tmp_path / "source", tmp_path / "reference"
    source.write_text("\n".join(captions[:40]) + "\n")
    reference.write_text("\n".join(eager_answers("en-de", captions[1:41])[1]) + "\n")
    sides = (
        ["--checkpoint", str(ROOT / "model/pretrained/en-de")],
        ["--bundle", str(bundles / "en-de")],
        ["--server", shared_server.address, "--model", "en-de"],
    )
    scores = []
    for side in sides:
        command = [
            sys.executable,
            "-m",
            "dragoman",
            "evaluate",
            *side,
            "--source",
            str(source),
            "--reference",
            str(reference),
            "--json",
        ]
        scores.append(json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout))
    assert scores[0] == scores[1] == scores[2]
    assert 0 < scores[0]["bleu"] < 100 and "tok:13a" in scores[0]["bleu_signature"]
