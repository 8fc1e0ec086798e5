"""Sample answers: what export stores, that it is the model's own, and every reason to refuse a file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.export.answering import MAX_NEW_TOKENS, MAX_SOURCE_TOKENS
from dragoman.export.arguments import ExportError, Shortlist
from dragoman.export.bundle import MANIFEST_FILE, SAMPLES_FILE, Bundle, hash_file, read_manifest
from dragoman.export.exporter import export_checkpoint
from dragoman.export.fields import MAX_SAMPLES_BYTES, BundleError
from dragoman.export.processor import Platform
from dragoman.export.samples import Samples, read_samples
from dragoman.export.session import this_platform
from dragoman.export.verify_half import WIDENED
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.decode import Start, greedy_search
from dragoman.model.generation import Language, Languages, Template
from dragoman.server.core.frames import Frames

MakeCheckpoint = Callable[..., Checkpoint]
LANGUAGES = Languages(
    source=[Language(code="en", source_prefix=[281]), Language(code="is", source_suffix=[282])],
    target=[
        Language(code="de", target_prefix=[289, 17]),
        Language(code="fr", source_prefix=[283], target_prefix=[290]),
        Language(code="fi", decoder_start_id=7),
    ],
    default_target="fr",
)
TEMPLATE = Template(source_prefix=[284], target_prefix=[291], decoder_start_id=9, task="to {target}: ")


def exported_from(checkpoint: Checkpoint, folder: Path, **options: Any) -> Bundle:
    checkpoint.save(folder / "checkpoint")
    return export_checkpoint(folder / "checkpoint", folder / "bundle", **options)


def samples_of(bundle: Bundle) -> Samples:
    samples = read_samples(bundle.directory, bundle.manifest)
    assert samples is not None
    return samples


@pytest.fixture(scope="module")
def samples(exported: Path) -> Samples:
    return samples_of(Bundle.open(exported))


@pytest.mark.parametrize(
    "switches",
    [{}, {"max_source_positions": 150, "max_target_positions": 40}, {"max_source_positions": 6, "max_target_positions": 3}],
    ids=["short", "long", "tiny"],
)
def test_answers_are_the_models_own(make_checkpoint: MakeCheckpoint, tmp_path: Path, switches: dict[str, int]) -> None:
    checkpoint = make_checkpoint(**switches)
    samples, config = samples_of(exported_from(checkpoint, tmp_path)), checkpoint.model.config
    assert len(samples.samples) == 8 and samples.tolerance == 2e-4 and samples.are_scores_exact
    lengths = [len(sample.source) for sample in samples.samples]
    assert lengths[0] == 1 and max(lengths) == min(config.max_source_positions, MAX_SOURCE_TOKENS)
    assert samples.max_new_tokens == min(MAX_NEW_TOKENS, config.max_target_positions)
    assert (max(lengths) > 64) == (config.max_source_positions > 64)
    for sample in samples.samples:
        (expected,) = greedy_search(checkpoint.model, [sample.source[:-1]], samples.max_new_tokens)
        assert [token for token in sample.ids if token != config.eos_id] == expected.ids
        np.testing.assert_allclose(sample.log_probs, expected.log_probs, atol=1e-4)
        assert all(len(row) == 4 for row in sample.candidates)
    for pair in samples.pairs:
        assert pair.target[-1] == config.eos_id


def test_numbers_are_single_precision_to_the_last_bit(samples: Samples) -> None:
    values = [value for sample in samples.samples for value in sample.log_probs]
    assert values == [float(np.float32(value)) for value in values] and len(set(values)) > 50


def test_the_same_machine_writes_the_same_file(checkpoint_dir: Path, exported: Path, tmp_path: Path) -> None:
    again = export_checkpoint(checkpoint_dir, tmp_path / "again").directory
    assert (again / SAMPLES_FILE).read_bytes() == (exported / SAMPLES_FILE).read_bytes()


def test_sources_have_what_is_said_around_a_text_in_every_language(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = replace(make_checkpoint(max_source_positions=100), template=TEMPLATE, languages=LANGUAGES)
    bundle = exported_from(checkpoint, tmp_path)
    samples, frames = samples_of(bundle), Frames(bundle.manifest)
    told = set()
    for sample in samples.samples:
        for target in ("de", "fr", "fi"):
            for source in ("en", "is"):
                frame = frames.find(source, target)
                head, tail = [*frame.source_prefix], [*frame.source_suffix]
                if (
                    sample.source[: len(head)] == head
                    and sample.source[len(sample.source) - len(tail) :] == tail
                    and (sample.target_prefix, sample.decoder_start_id) == (frame.target_prefix, frame.decoder_start_id)
                ):
                    told.add((source, target))
                    break
        start = Start([sample.target_prefix], sample.decoder_start_id, is_complete=True)
        (expected,) = greedy_search(checkpoint.model, [sample.source], samples.max_new_tokens, start)
        assert [token for token in sample.ids if token != 1] == expected.ids
        np.testing.assert_allclose(sample.log_probs, expected.log_probs, atol=1e-4)
    assert {target for _, target in told} == {"de", "fr", "fi"} and {source for source, _ in told} == {"en", "is"}
    text = samples.samples[0].source
    assert len(text) > 4, "a source without text has the task's"


def test_a_task_without_its_language_is_refused_before_a_server_does(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot be served: the task needs a target language"):
        exported_from(replace(make_checkpoint(), template=Template(task="to {target}: ")), tmp_path)


@pytest.mark.parametrize("options", [{"precision": "int8"}, {"precision": "int8", "cache_precision": "int8", "weight_bits": 7}])
def test_in_8_bits_the_tolerance_is_what_rounding_does(checkpoint_dir: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    samples = samples_of(export_checkpoint(checkpoint_dir, tmp_path / "bundle", **options))
    assert 2e-4 < samples.tolerance < 2 and samples.platform == this_platform()


def test_halves_are_computed_on_the_cpu_or_widened(checkpoint_dir: Path, tmp_path: Path) -> None:
    fp16 = samples_of(export_checkpoint(checkpoint_dir, tmp_path / "fp16", "fp16"))
    assert (fp16.platform, fp16.device, fp16.tolerance) == (this_platform(), "cpu", 0.2)
    bf16 = samples_of(export_checkpoint(checkpoint_dir, tmp_path / "bf16", "bf16"))
    assert (bf16.platform, bf16.device, bf16.tolerance) == (Platform(), WIDENED, 1.6), "no platform has its bits"


def test_with_a_shortlist_only_its_tokens_are_told(checkpoint_dir: Path, tmp_path: Path) -> None:
    bundle = export_checkpoint(checkpoint_dir, tmp_path / "bundle", shortlist=Shortlist(["two dogs"]))
    listed = set(json.loads((bundle.directory / "shortlist.json").read_text())["ids"])
    told = {token for sample in samples_of(bundle).samples for row in sample.candidates for token, _ in row}
    assert told <= listed and samples_of(bundle).tolerance == 2e-4


def test_a_tolerance_of_rounding_is_wider_where_graphs_are_farther_off(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dragoman.export import answering

    monkeypatch.setattr(answering, "_difference", lambda *_: 0.0123456)
    assert samples_of(exported_from(make_checkpoint(), tmp_path)).tolerance == 0.025, "twice what was measured, two digits, up"


def test_a_bundle_without_samples_is_one(bundle_dir: Path) -> None:
    path = bundle_dir / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    del manifest["files"][SAMPLES_FILE]
    path.write_text(json.dumps(manifest))
    (bundle_dir / SAMPLES_FILE).unlink()
    bundle = Bundle.open(bundle_dir)
    assert read_samples(bundle.directory, bundle.manifest) is None


def refusal(directory: Path, content: bytes) -> str:
    """Put a file in the samples' place, checksum and all, and return why it is refused."""
    (directory / SAMPLES_FILE).write_bytes(content)
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["files"][SAMPLES_FILE] = {"size": len(content), "sha256": hash_file(directory / SAMPLES_FILE)}
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError) as caught:
        bundle = Bundle.open(directory)
        read_samples(bundle.directory, bundle.manifest)
    assert "\n" not in str(caught.value) and SAMPLES_FILE in str(caught.value)
    return str(caught.value)


def edited(directory: Path, change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads((directory / SAMPLES_FILE).read_text())
    change(content)
    return refusal(directory, json.dumps(content).encode())


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
        (
            lambda content: content["pairs"][0].update(target=[5] * 21, log_probs=[-1.0] * 21),
            "the target of pair 1 has 21 tokens, and the model takes 20",
        ),
    ],
)
def test_what_a_model_cannot_have_answered_is_refused(bundle_dir: Path, change: Callable[..., object], reason: str) -> None:
    assert reason in edited(bundle_dir, change)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("NaN", "invalid character"), ("Infinity", "invalid character"), ("1e999", "out of range"), ('"-1"', "Expected `float`")],
)
def test_numbers_that_are_none_are_refused(bundle_dir: Path, value: str, reason: str) -> None:
    content = (bundle_dir / SAMPLES_FILE).read_text()
    start = content.index('"log_probs":[') + len('"log_probs":[')
    end = min(content.index(mark, start) for mark in ",]")
    assert reason in refusal(bundle_dir, (content[:start] + value + content[end:]).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a"', b"[" * 100_000])
def test_what_is_no_json_of_samples_is_refused(bundle_dir: Path, content: bytes) -> None:
    assert "not sample answers" in refusal(bundle_dir, content)


def test_a_file_of_a_gigabyte_is_refused_before_it_is_read(bundle_dir: Path) -> None:
    path = bundle_dir / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["files"][SAMPLES_FILE]["size"] = 1 << 30
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"{SAMPLES_FILE} has {1 << 30} bytes; at most {MAX_SAMPLES_BYTES} are allowed"):
        Bundle.open(bundle_dir)
    with (bundle_dir / SAMPLES_FILE).open("wb") as file:
        file.truncate(1 << 30)
    manifest["files"][SAMPLES_FILE]["size"] = 9
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"more than {MAX_SAMPLES_BYTES} bytes"):
        read_samples(bundle_dir, read_manifest(path))


def test_a_million_samples_are_refused_by_their_size(bundle_dir: Path) -> None:
    assert f"at most {MAX_SAMPLES_BYTES} are allowed" in edited(
        bundle_dir, lambda content: content.update(samples=content["samples"][:1] * 10_000)
    )
