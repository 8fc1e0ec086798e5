"""What a bundle is, and every reason to refuse one."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.export.bundle import (
    CARD_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    PARITY_FILE,
    SAMPLES_FILE,
    Bundle,
    BundleError,
    Manifest,
    Tensors,
    content_version,
    cross_kv_names,
    read_manifest,
    self_kv_names,
    self_kv_output_names,
)
from dragoman.export.caches import attention_caches
from dragoman.model.errors import InputError
from dragoman.model.text.byte_level import ByteLevelTokenizer

# A manifest of format 4 with only what it must have.
LEAST: dict[str, Any] = {
    "format_version": 4,
    "name": "x",
    "version": "x",
    "precision": "fp32",
    "d_model": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "source_vocab_size": 3,
    "target_vocab_size": 3,
    "pad_id": 0,
    "eos_id": 1,
    "decoder_start_id": 2,
    "max_source_tokens": 4,
    "max_target_tokens": 4,
    "default_max_new_tokens": 4,
    "caches": msgspec.to_builtins(attention_caches(1, 1, 8)),
    "num_choices": 3,
    "tensors": msgspec.to_builtins(Tensors.of_layers(1)),
    "files": {"encoder.onnx": {"size": 1, "sha256": "0" * 64}},
    "origin": {"weights_sha256": "0" * 64, "torch": "2", "onnx": "1"},
    "parity": {
        "tolerance": 1.0,
        "max_log_prob_difference": 0.0,
        "num_rows": 1,
        "num_steps": 1,
        "num_sentences": 1,
        "num_token_mismatches": 0,
        "num_pairs": 1,
        "max_score_difference": 0.0,
        "max_attention_difference": 0.0,
    },
}


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def refusal(directory: Path, *, is_checked: bool = True) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(directory, is_checked)
    return str(caught.value)


def test_refusal_is_a_fault_of_the_input() -> None:
    assert issubclass(BundleError, InputError)


def test_server_can_import_it_without_the_libraries_of_export() -> None:
    program = "import sys, dragoman.export.bundle; sys.exit(bool({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_tensor_names_are_those_of_the_format() -> None:
    assert self_kv_names(2) == ["self_k_0", "self_v_0", "self_k_1", "self_v_1"]
    assert self_kv_output_names(1) == ["self_k_0_out", "self_v_0_out"]
    assert cross_kv_names(2) == ["cross_k_0", "cross_v_0", "cross_k_1", "cross_v_1"]
    tensors = Tensors.of_layers(1)
    assert tensors.encoder_inputs == ["src_ids", "positions", "cells", "grid", "src_lens"]
    assert tensors.encoder_outputs == ["cross_kv"]
    padded = Tensors.of_layers(1, is_packed=False)
    assert (padded.encoder_inputs, padded.encoder_outputs) == (["src_ids", "src_lens"], cross_kv_names(1))
    assert msgspec.structs.replace(padded, encoder_inputs=tensors.encoder_inputs, encoder_outputs=["cross_kv"]) == tensors
    assert tensors.decoder_inputs == [
        "prev_ids", "positions", "src_lens", "num_candidates", "self_k_0", "self_v_0", "cross_k_0", "cross_v_0",
    ]  # fmt: skip
    assert tensors.decoder_outputs == ["candidate_ids", "candidate_log_probs", "self_k_0_out", "self_v_0_out"]
    assert tensors.scorer_inputs == ["src_ids", "src_lens", "tgt_ids", "tgt_lens", "labels"]
    assert tensors.scorer_outputs == ["label_log_probs", "attention"]


def test_opened_bundle_gives_what_the_server_needs(exported: Path) -> None:
    bundle = Bundle.open(exported)
    assert bundle.encoder_path == exported / "encoder.onnx"
    assert bundle.decoder_path == exported / "decoder.onnx"
    assert bundle.scorer_path == exported / "scorer.onnx"
    assert bundle.encoder_path.is_file() and bundle.decoder_path.is_file() and bundle.scorer_path.is_file()
    tokenizer = bundle.tokenizers().source
    assert tokenizer.decode(tokenizer.encode("two dogs 犬")) == "two dogs 犬"
    assert bundle.manifest.tensors == Tensors.of_layers(2)


def test_manifest_survives_a_round_trip(exported: Path) -> None:
    manifest = read_manifest(exported / MANIFEST_FILE)
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=type(manifest)) == manifest


def test_manifest_lists_every_other_file(exported: Path) -> None:
    present = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    assert set(Bundle.open(exported).manifest.files) == present - {MANIFEST_FILE}


def test_stray_files_are_ignored(bundle_dir: Path) -> None:
    (bundle_dir / "notes.txt").write_text("mine")
    (bundle_dir / "elsewhere").symlink_to("/")
    assert Bundle.open(bundle_dir).manifest.name == "tiny"


def test_directory_may_be_reached_through_a_link(exported: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(exported)
    assert Bundle.open(link).manifest.name == "tiny"


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path / "none" / MANIFEST_FILE) in refusal(tmp_path / "none")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff", b'{"format_version": 4}', b'{"format_version": 4, "name": "x"}']
)
def test_invalid_manifest_is_refused(bundle_dir: Path, content: bytes) -> None:
    (bundle_dir / MANIFEST_FILE).write_bytes(content)
    assert refusal(bundle_dir).startswith(f"{bundle_dir / MANIFEST_FILE}: not a bundle's manifest")


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1, "4", None, 0, -1, True])
def test_other_format_version_is_refused_before_the_rest_is_read(bundle_dir: Path, version: object) -> None:
    edit(bundle_dir, lambda manifest: manifest.update(format_version=version, later_field=1))
    advice = "; export the checkpoint again" if version == FORMAT_VERSION - 1 else ""
    path = bundle_dir / MANIFEST_FILE
    assert refusal(bundle_dir) == f"{path}: format version {json.dumps(version)}, but this release reads 4{advice}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(surprise=1), "surprise"),
        (lambda m: m.pop("eos_id"), "eos_id"),
        (lambda m: m.update(precision="fp12"), "fp12"),
        (lambda m: m.update(num_choices=301), "num_choices 301 is over the vocabulary of 300"),
        (lambda m: m["caches"].insert(0, m["caches"].pop()), "caches that steps write come before those that the encoder gives"),
        (lambda m: m["caches"][1].update(name="self_k_0"), '"self_k_0" twice'),
        (lambda m: m["caches"][1].update(name="self_k_0_out"), '"self_k_0_out" twice'),
        (lambda m: m["caches"][0].update(name="prev_ids"), '"prev_ids" twice, or as the name of another tensor'),
        (lambda m: m["caches"][0].update(name="mine"), "tensors.decoder_inputs lacks mine"),
        (lambda m: m["caches"].pop(), "tensors.decoder_inputs has unknown cross_v_1"),
        (lambda m: m["caches"][0].update(shape=[4, "S", 8]), "shape of self_k_0 may have 'T' once, not 'S'"),
        (lambda m: m["caches"][-1].update(shape=[4, "T", 8]), "shape of cross_v_1 may have 'S' once, not 'T'"),
        (lambda m: m["caches"][0].update(shape=["T", 4, "T"]), "shape of self_k_0 may have 'T' once, not 'T', 'T'"),
        (lambda m: m["caches"][0].update(shape=[65536, "T", 2]), "shape of self_k_0 has 131072 numbers a position, over 65536"),
        (lambda m: m.update(pad_id=300), "pad_id 300"),
        (lambda m: m.update(default_max_new_tokens=21), "default_max_new_tokens 21"),
        (lambda m: m["files"]["encoder.onnx"].update(sha256="ABC"), "sha256"),
        (lambda m: m.update(domain="x" * 201), "domain"),
        (lambda m: m.update(domain="two\nlines\n"), "domain"),
        (lambda m: m.update(domain="at the end\n"), "domain"),
        (lambda m: m.update(domain="\x1b[2J"), "domain"),
        (lambda m: m.update(domain="\u202etxet"), "domain"),
        (lambda m: m.update(domain=None), "domain"),
    ],
)
def test_manifest_that_makes_no_sense_is_refused(bundle_dir: Path, change: Callable[[dict[str, Any]], object], reason: str) -> None:
    edit(bundle_dir, change)
    message = refusal(bundle_dir)
    assert MANIFEST_FILE in message and reason in message


@pytest.mark.parametrize("path", ["encoder.onnx", "decoder.weights", "scorer.onnx", PARITY_FILE, "tokenizer/tokenizer.json"])
def test_missing_file_is_refused(bundle_dir: Path, path: str) -> None:
    (bundle_dir / path).unlink()
    assert refusal(bundle_dir) == f"{bundle_dir / path}: no such file, though {MANIFEST_FILE} lists it"


@pytest.mark.parametrize("path", ["encoder.onnx", "decoder.weights", "scorer.onnx", PARITY_FILE, "tokenizer/tokenizer.json"])
def test_unlisted_file_is_refused(bundle_dir: Path, path: str) -> None:
    edit(bundle_dir, lambda manifest: manifest["files"].pop(path))
    assert path.split("/")[0] in refusal(bundle_dir)


def test_directory_in_place_of_a_file_is_refused(bundle_dir: Path) -> None:
    (bundle_dir / "encoder.onnx").unlink()
    (bundle_dir / "encoder.onnx").mkdir()
    assert "encoder.onnx: no such file" in refusal(bundle_dir)


@pytest.mark.parametrize("is_checked", [True, False])
def test_other_size_is_refused(bundle_dir: Path, is_checked: bool) -> None:
    path = bundle_dir / "encoder.weights"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert refusal(bundle_dir, is_checked=is_checked) == f"{path}: {size - 1} bytes, but {MANIFEST_FILE} says {size}"


def test_flipped_bit_is_refused_when_checked(bundle_dir: Path) -> None:
    path = bundle_dir / "decoder.weights"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert re.match(rf"{re.escape(str(path))}: SHA-256 [0-9a-f]{{64}}, but {MANIFEST_FILE} says", refusal(bundle_dir))
    Bundle.open(bundle_dir, is_checked=False)


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "tokenizer/../../outside", "..\\outside", "", "a\0b"])
def test_path_out_of_the_directory_is_refused(bundle_dir: Path, path: str) -> None:
    (bundle_dir.parent / "outside").write_text("secret")
    edit(bundle_dir, lambda manifest: manifest["files"].update({path: {"size": 6, "sha256": "0" * 64}}))
    assert "is not a path inside the bundle" in refusal(bundle_dir)


def test_link_out_of_the_directory_is_refused(bundle_dir: Path) -> None:
    path = bundle_dir / "decoder.weights"
    path.rename(bundle_dir.parent / "elsewhere")
    path.symlink_to(bundle_dir.parent / "elsewhere")
    assert refusal(bundle_dir) == f"{path}: a link that leads outside the bundle"


def test_link_within_the_directory_is_accepted(bundle_dir: Path) -> None:
    (bundle_dir / "decoder.weights").rename(bundle_dir / "data")
    (bundle_dir / "decoder.weights").symlink_to("data")
    assert Bundle.open(bundle_dir).manifest.name == "tiny"


def test_missing_tensors_are_listed(bundle_dir: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for name in ("self_k_1", "cross_v_0"):
            manifest["tensors"]["decoder_inputs"].remove(name)

    edit(bundle_dir, change)
    assert refusal(bundle_dir).endswith("tensors.decoder_inputs lacks self_k_1, cross_v_0")


def test_unknown_tensors_are_listed(bundle_dir: Path) -> None:
    edit(bundle_dir, lambda manifest: manifest["tensors"]["encoder_outputs"].append("memory"))
    assert refusal(bundle_dir).endswith("tensors.encoder_outputs has unknown memory")


def test_file_that_is_no_tokeniser_is_refused(bundle_dir: Path) -> None:
    bundle = Bundle.open(bundle_dir)
    (bundle_dir / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        bundle.tokenizers()


def test_tokeniser_with_more_tokens_than_the_model_is_refused(exported: Path) -> None:
    bundle = Bundle.open(exported)
    bundle.manifest = msgspec.structs.replace(bundle.manifest, source_vocab_size=279)
    with pytest.raises(BundleError, match="280 tokens, the model room for 279"):
        bundle.tokenizers()


def test_domain_comes_from_the_checkpoints_card(exported: Path) -> None:
    assert Bundle.open(exported).manifest.domain == "dogs on the grass"


def test_the_card_goes_along_and_changes_no_version(exported: Path, bundle_dir: Path, checkpoint_dir: Path) -> None:
    assert Bundle.open(exported).card() == (checkpoint_dir / "README.md").read_text()
    version = Bundle.open(bundle_dir).manifest.version
    edit(bundle_dir, lambda manifest: manifest["files"].pop(CARD_FILE))
    without = Bundle.open(bundle_dir)
    assert without.card() == "" and content_version(without.manifest) == version


@pytest.mark.parametrize(
    "change", [lambda card: card.write_text("# Another"), Path.unlink, lambda card: card.write_bytes(b"x" * (1 << 20))]
)
def test_a_card_that_is_not_the_one_that_was_exported_is_not_told(bundle_dir: Path, change: Callable[[Path], Any]) -> None:
    bundle = Bundle.open(bundle_dir)
    change(bundle_dir / CARD_FILE)
    assert bundle.card() == ""


def test_bundle_from_before_there_was_a_domain_is_read_and_keeps_its_version(bundle_dir: Path) -> None:
    version = Bundle.open(bundle_dir).manifest.version
    edit(bundle_dir, lambda manifest: manifest.pop("domain"))
    manifest = Bundle.open(bundle_dir).manifest
    assert manifest.domain == ""
    assert content_version(manifest) == version
    assert content_version(msgspec.convert(LEAST, Manifest)) == "a2f50c008db8", "what it was then"


def test_version_follows_what_the_model_answers_and_nothing_else(exported: Path) -> None:
    manifest = Bundle.open(exported).manifest
    assert manifest.version == content_version(manifest)
    assert re.fullmatch("[0-9a-f]{12}", manifest.version)

    def version(**changes: Any) -> str:
        return content_version(msgspec.structs.replace(manifest, **changes))

    def files(path: str) -> dict[str, Any]:
        return manifest.files | {path: msgspec.structs.replace(manifest.files[path], sha256="0" * 64)}

    assert version(name="other") == manifest.version == version(domain="other")
    assert version(files=files(PARITY_FILE)) == manifest.version == version(files=files(SAMPLES_FILE))
    unsampled = {path: entry for path, entry in manifest.files.items() if path != SAMPLES_FILE}
    assert version(files=unsampled) == manifest.version, "a bundle of before is the same model"
    assert version(files=dict(reversed(manifest.files.items()))) == manifest.version
    others = [
        version(files=files("decoder.weights")),
        version(files=files("tokenizer/tokenizer.json")),
        version(decoder_start_id=3),
    ]
    assert len({manifest.version, *others}) == 4


def test_a_tokeniser_that_the_manifest_does_not_list_is_not_opened(bundle_dir: Path) -> None:
    """Nothing vouches for it: no checksum, and no signature."""
    (bundle_dir / "tokenizer/text.json").write_text(
        json.dumps({"format_version": 1, "source": {"type": "bytes", "eos_id": 1, "offset": 0, "num_extra": 0}})
    )
    assert isinstance(Bundle.open(bundle_dir).tokenizers().source, ByteLevelTokenizer)


def test_a_tokenisers_file_that_the_manifest_does_not_list_is_refused(bundle_dir: Path) -> None:
    manifest = json.loads((bundle_dir / "bundle.json").read_text())
    entry = manifest["files"].pop("tokenizer/tokenizer.json")
    shutil.copy(bundle_dir / "tokenizer/tokenizer.json", bundle_dir / "tokenizer/other.json")
    manifest["files"]["tokenizer/other.json"] = entry
    (bundle_dir / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"tokenizer/tokenizer\.json: is not listed"):
        Bundle.open(bundle_dir).tokenizers()
