"""Sample answers: export stores the model's own, and a file that no model can have answered is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.export import answering
from dragoman.export.answering import MAX_NEW_TOKENS, MAX_SOURCE_TOKENS
from dragoman.export.arguments import ExportError
from dragoman.export.bundle import Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.export.fields import MAX_SAMPLES_BYTES, BundleError
from dragoman.export.manifest import MANIFEST_FILE, SAMPLES_FILE, parse_manifest
from dragoman.export.processor import Platform
from dragoman.export.proof.sessions import WIDENED
from dragoman.export.samples import Samples, read_samples
from dragoman.export.session import this_platform
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.generation import Language, Languages, Template
from dragoman.server.service.languages import PromptTemplates
from tests.export.conftest import Export, MakeCheckpoint, edit, seal

SOURCES = [Language(code="en", source_prefix=[281]), Language(code="is", source_suffix=[282])]
TARGETS = [Language(code="de", target_prefix=[289, 17]), Language(code="fr", source_prefix=[283], target_prefix=[290])]
LANGUAGES = Languages(source=SOURCES, target=[*TARGETS, Language(code="fi", decoder_start_id=7)], default_target="fr")
TEMPLATE = Template(source_prefix=[284], target_prefix=[291], decoder_start_id=9, task="to {target}: ")


def exported_from(checkpoint: Checkpoint, folder: Path) -> Bundle:
    checkpoint.save(folder / "checkpoint")
    return export_checkpoint(folder / "checkpoint", folder / "bundle")


def samples_of(bundle: Bundle) -> Samples:
    samples = read_samples(bundle.directory, bundle.manifest)
    assert samples is not None
    return samples


@torch.inference_mode()
def log_probs_of(checkpoint: Checkpoint, source: list[int], target: list[int], start: int | None) -> torch.Tensor:
    """Return the network's log-probabilities `[T, V]` at each position of a target."""
    model = checkpoint.model
    inputs = [model.config.decoder_start_id if start is None else start, *target[:-1]]
    return model.decoder.log_probs(model.observe(source, inputs).hidden)


def assert_answers_are_the_models(checkpoint: Checkpoint, bundle: Bundle, tolerance: float = 1e-4) -> None:
    """Compare sample answers, their candidates and scored pairs with the network; they are greedy, and of every length."""
    samples, config, manifest = samples_of(bundle), checkpoint.model.config, bundle.manifest
    assert len(samples.samples) == 8 and samples.are_scores_exact
    assert samples.tolerance == 2e-4 or (manifest.precision == "int8" and 2e-4 < samples.tolerance < 2)
    lengths, longest = [len(sample.source) for sample in samples.samples], min(config.max_source_positions, MAX_SOURCE_TOKENS)
    if not manifest.has_prompts:
        assert max(lengths) == longest and lengths[0] == (1 if manifest.languages is None else 11)
    for sample in samples.samples:
        assert len(sample.ids) == samples.max_new_tokens or sample.ids[-1] == config.eos_id
        number = len(sample.ids)
        expected = log_probs_of(checkpoint, sample.source, [*sample.target_prefix, *sample.ids], sample.decoder_start_id)[-number:]
        best = expected.topk(4).values
        for row, ids, log_probs in zip(sample.candidates, sample.ids, sample.log_probs, strict=True):
            assert row[0] == (ids, log_probs) and float(np.float32(log_probs)) == log_probs
        found = [[value for _, value in row] for row in sample.candidates]
        places = torch.tensor([[token for token, _ in row] for row in sample.candidates])
        np.testing.assert_allclose(found, expected[torch.arange(number)[:, None], places], atol=tolerance)
        np.testing.assert_allclose(found, best, atol=2 * tolerance)
    for pair in samples.pairs:
        assert pair.target[-1] == config.eos_id
        expected = log_probs_of(checkpoint, pair.source, pair.target, pair.decoder_start_id)
        np.testing.assert_allclose(pair.log_probs, expected[range(len(pair.target)), pair.target], atol=tolerance)
    assert samples.max_new_tokens <= min(MAX_NEW_TOKENS, config.max_target_positions)


def test_sources_have_what_is_said_around_a_text_in_every_language(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = replace(make_checkpoint(max_source_positions=100), template=TEMPLATE, languages=LANGUAGES)
    bundle = exported_from(checkpoint, tmp_path)
    assert_answers_are_the_models(checkpoint, bundle)
    templates = [PromptTemplates(bundle.manifest).find(source, target) for target in ("de", "fr", "fi") for source in ("en", "is")]
    told = set()
    for sample in samples_of(bundle).samples:
        for template in templates:
            head, tail = [*template.source_prefix], [*template.source_suffix]
            is_around = sample.source[: len(head)] == head and sample.source[len(sample.source) - len(tail) :] == tail
            if is_around and (sample.target_prefix, sample.decoder_start_id) == (template.target_prefix, template.decoder_start_id):
                told |= {template.source_language, template.target_language}
                break
    assert told == {"de", "fr", "fi", "en", "is"}


def test_task_without_its_language_is_refused_at_export(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot be served: the task needs a target language"):
        exported_from(replace(make_checkpoint(), template=Template(task="to {target}: ")), tmp_path)


def test_device_and_tolerance_follow_from_the_precision(export: Export) -> None:
    here = this_platform()
    for options in ({}, {"cache_precision": "fp32"}):
        samples = samples_of(export("tiny", "int8", **options))
        assert 2e-4 < samples.tolerance < 2 and samples.platform == here
    fp16, bf16 = (samples_of(export("tiny", precision)) for precision in ("fp16", "bf16"))
    assert (fp16.platform, fp16.device, fp16.tolerance) == (here, "cpu", 0.2)
    assert (bf16.platform, bf16.device, bf16.tolerance) == (Platform(), WIDENED, 1.6), "no platform has its bits"


def test_with_a_shortlist_only_its_tokens_are_candidates(export: Export) -> None:
    bundle = export(is_short=True)
    listed = set(json.loads((bundle.directory / "shortlist.json").read_text())["ids"])
    told = {token for sample in samples_of(bundle).samples for row in sample.candidates for token, _ in row}
    assert told <= listed and samples_of(bundle).tolerance == 2e-4
    assert [answering._rounded_up(value) for value in (2 * 0.0123456, 2e-4, 0.2, 0.99, 0.991)] == [0.025, 2e-4, 0.2, 0.99, 1.0]


def test_bundle_without_samples_is_valid(bundle_dir: Path) -> None:
    edit(bundle_dir / MANIFEST_FILE, lambda manifest: manifest["files"].pop(SAMPLES_FILE))
    bundle = Bundle.open(bundle_dir)
    assert read_samples(bundle.directory, bundle.manifest) is None


def refusal(directory: Path, content: bytes) -> str:
    """Put a file in the samples' place, checksum and all, and return why it is refused."""
    (directory / SAMPLES_FILE).write_bytes(content)
    seal(directory, SAMPLES_FILE)
    with pytest.raises(BundleError) as caught:
        bundle = Bundle.open(directory)
        read_samples(bundle.directory, bundle.manifest)
    assert "\n" not in str(caught.value) and SAMPLES_FILE in str(caught.value)
    return str(caught.value)


def first(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["samples"][0].update(fields)


ROW = [[5, -1.0], [6, -2.0]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content.update(format=2), "Invalid enum value 2 - at `$.format`"),
        (lambda content: content.update(more=1), "unknown field `more`"),
        (lambda content: content.pop("platform"), "missing required field `platform`"),
        (lambda content: content.update(tolerance=-1), "Expected `float` >= 0"),
        (lambda content: content.update(samples=[]), "Expected `array` of length >= 1"),
        (lambda content: content.update(samples=content["samples"] * 9), "Expected `array` of length <= 64"),
        (lambda content: content.update(max_new_tokens=4000), "the answer of sample 1 has 4000 tokens, and the model takes 20"),
        (lambda content: content.update(platform={"identity": "x" * 99}), "Expected `str` of length <= 64"),
        (first(source=[300, 1]), "the source of sample 1 has token 300, which is outside the vocabulary of 300"),
        (first(source=[5] * 25), "the source of sample 1 has 25 tokens, and the model takes 24"),
        (first(source=[5] * 5000), "Expected `array` of length <= 4096"),
        (first(source=[-1]), "Expected `int` >= 0"),
        (first(source=[]), "the source of sample 1 has no token, and the model takes 1 at least"),
        (first(target_prefix=[300]), "the target of sample 1 has token 300"),
        (first(decoder_start_id=301), "the target of sample 1 has token 301"),
        (first(ids=[5], log_probs=[-1.0], candidates=[]), "Expected `array` of length >= 1"),
        (first(ids=[5], log_probs=[-1.0, -1.0], candidates=[ROW]), "1 ids with 2 log_probs and 1 candidates"),
        (first(ids=[5], log_probs=[-1.0], candidates=[ROW]), "sample 1 has 1 tokens, where 20 were allowed"),
        (first(ids=[6], log_probs=[-1.0], candidates=[ROW]), "the first of candidates at position 0 is not the answer's token"),
        (first(ids=[5], log_probs=[-1.0], candidates=[ROW[::-1]]), "the first of candidates at position 0"),
        (first(ids=[6], log_probs=[-2.0], candidates=[ROW[::-1]]), "candidates at position 0 are not in order"),
        (first(ids=[5], log_probs=[-1.0], candidates=[[[5, -1.0], [400, -2.0]]]), "has token 400"),
        (first(ids=[5], log_probs=[-1e300], candidates=[[[5, -1e300]]]), "Expected `float` >= -1000000000.0"),
        (first(ids=[1, 1], log_probs=[-1.0, -1.0], candidates=[[[1, -1.0]]] * 2), "sample 1 goes on after end-of-sequence"),
        (lambda content: content["pairs"][0].update(log_probs=[-1.0]), "ids of a target with 1 log_probs"),
        (lambda content: content["pairs"][1].update(source=[299] * 25), "the source of pair 2 has 25 tokens"),
        (lambda content: content["pairs"][0].update(target=[5] * 21, log_probs=[-1.0] * 21), "the target of pair 1 has 21 tokens"),
    ],
)
def test_answers_that_no_model_can_give_are_refused(bundle_dir: Path, change: Callable[..., object], reason: str) -> None:
    edit(bundle_dir / SAMPLES_FILE, change)
    assert reason in refusal(bundle_dir, (bundle_dir / SAMPLES_FILE).read_bytes())


def test_content_that_is_no_json_and_values_that_are_no_numbers_are_refused(bundle_dir: Path) -> None:
    text = (bundle_dir / SAMPLES_FILE).read_text()
    start = text.index('"log_probs":[') + len('"log_probs":[')
    end = min(text.index(mark, start) for mark in ",]")
    values = {"NaN": "invalid character", "Infinity": "invalid character", "1e999": "out of range", '"-1"': "Expected `float`"}
    for value, reason in values.items():
        assert reason in refusal(bundle_dir, (text[:start] + value + text[end:]).encode())
    for content in (b"", b"[]", b"\xff", b'{"a"', b"[" * 100_000):
        assert "not sample answers" in refusal(bundle_dir, content)


def test_file_beyond_the_limit_is_refused_before_it_is_read(bundle_dir: Path) -> None:
    def say(size: int) -> None:
        edit(bundle_dir / MANIFEST_FILE, lambda manifest: manifest["files"][SAMPLES_FILE].update(size=size))

    say(1 << 30)
    with pytest.raises(BundleError, match=f"{SAMPLES_FILE} has {1 << 30} bytes; at most {MAX_SAMPLES_BYTES} are allowed"):
        Bundle.open(bundle_dir)
    with (bundle_dir / SAMPLES_FILE).open("wb") as file:
        file.truncate(1 << 30)
    say(9)
    with pytest.raises(BundleError, match=f"more than {MAX_SAMPLES_BYTES} bytes"):
        read_samples(bundle_dir, parse_manifest((bundle_dir / MANIFEST_FILE).read_bytes(), MANIFEST_FILE))
