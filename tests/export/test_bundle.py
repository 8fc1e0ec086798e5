"""Bundles: the files that a manifest lists, and every reason to refuse a folder."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.export.bundle import Bundle, BundleError, hash_file
from dragoman.export.manifest import CARD_FILE, MANIFEST_FILE, PARITY_FILE, content_version
from dragoman.export.tensors import LOG_PROBS_OUTPUT, Tensors
from dragoman.model.text import tokenizer as tokenizer_files
from dragoman.model.text.byte_level import ByteLevelTokenizer
from tests.export.conftest import edit

TOKENIZER_FILE = "tokenizer/tokenizer.json"
Change = Callable[[Path], object]


def refusal(directory: Path, *, is_checked: bool = True) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(directory, is_checked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_opened_bundle_gives_what_the_server_needs(exported: Path, checkpoint_dir: Path) -> None:
    bundle = Bundle.open(exported)
    paths = bundle.encoder_path, bundle.decoder_path, bundle.scorer_path
    assert paths == tuple(exported / f"{name}.onnx" for name in ("encoder", "decoder", "scorer"))
    tokenizer = bundle.tokenizers().source
    assert tokenizer.decode(tokenizer.encode("two dogs 犬")) == "two dogs 犬"
    expected = Tensors.of_layers(2)
    expected.decoder_outputs.append(LOG_PROBS_OUTPUT)
    assert bundle.manifest.tensors == expected and bundle.manifest.domain == "dogs on the grass"
    assert bundle.card() == (checkpoint_dir / "README.md").read_text()
    present = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    assert set(bundle.manifest.files) == present - {MANIFEST_FILE}


def test_missing_manifest_or_list_of_a_shortlist_is_refused(bundle_dir: Path) -> None:
    def shorten(manifest: dict[str, Any]) -> None:
        manifest["num_choices"] = 299
        manifest["tensors"]["decoder_outputs"].remove(LOG_PROBS_OUTPUT)

    edit(bundle_dir / MANIFEST_FILE, shorten)
    assert refusal(bundle_dir, is_checked=False).endswith("files does not list shortlist.json")
    assert str(bundle_dir / "none" / MANIFEST_FILE) in refusal(bundle_dir / "none")


def test_links_within_the_folder_and_stray_files_are_accepted(bundle_dir: Path, tmp_path: Path) -> None:
    (bundle_dir / "decoder.weights").rename(bundle_dir / "data")
    (bundle_dir / "decoder.weights").symlink_to("data")
    (bundle_dir / "notes.txt").write_text("mine")
    (bundle_dir / "elsewhere").symlink_to("/")
    (tmp_path / "current").symlink_to(bundle_dir)
    assert Bundle.open(tmp_path / "current").manifest.name == "tiny"


@pytest.mark.parametrize(
    "path", ["encoder.onnx", "encoder.weights", "decoder.onnx", "decoder.weights", "scorer.onnx", PARITY_FILE, TOKENIZER_FILE]
)
def test_missing_and_unlisted_files_are_refused(bundle_dir: Path, path: str) -> None:
    (bundle_dir / path).unlink()
    assert refusal(bundle_dir) == f"{bundle_dir / path}: no such file, though {MANIFEST_FILE} lists it"
    edit(bundle_dir / MANIFEST_FILE, lambda manifest: manifest["files"].pop(path))
    wanted = "files lists nothing in tokenizer/" if path == TOKENIZER_FILE else f"files does not list {path}"
    assert refusal(bundle_dir).endswith(wanted)


@pytest.mark.parametrize("path", [MANIFEST_FILE, "encoder.onnx"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "circle", "dangling", "outside"])
def test_anything_but_a_file_of_the_bundle_is_refused_without_waiting(bundle_dir: Path, path: str, kind: str) -> None:
    place, away = bundle_dir / path, bundle_dir.parent / "away"
    place.rename(away)
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "directory":
            place.mkdir()
        case _:
            place.symlink_to({"device": "/dev/zero", "circle": place.name, "dangling": "nothing", "outside": away}[kind])
    for is_checked in (True, False):
        assert str(place) in (message := refusal(bundle_dir, is_checked=is_checked))
    assert kind != "outside" or message == f"{place}: a link that leads outside the bundle"


def test_other_size_or_content_is_refused(bundle_dir: Path) -> None:
    path = bundle_dir / "encoder.weights"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    expected = f"{path}: {len(content) - 1} bytes, but {MANIFEST_FILE} says {len(content)}"
    assert refusal(bundle_dir) == refusal(bundle_dir, is_checked=False) == expected
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.write_bytes(flipped)
    assert f"{path}: SHA-256 {hashlib.sha256(flipped).hexdigest()}, but {MANIFEST_FILE} says" in refusal(bundle_dir)
    Bundle.open(bundle_dir, is_checked=False).check_tokenizers()
    (bundle_dir / TOKENIZER_FILE).write_bytes((bundle_dir / TOKENIZER_FILE).read_bytes()[::-1])
    with pytest.raises(BundleError, match=r"tokenizer/tokenizer\.json: SHA-256"):
        Bundle.open(bundle_dir, is_checked=False).check_tokenizers()


def test_file_that_grows_while_it_is_hashed_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sha256, first = tmp_path / "weights", hashlib.sha256, b"first" * 100_000
    path.write_bytes(first)

    def growing() -> Any:
        with path.open("ab") as file:
            file.write(b"more")
        return sha256()

    monkeypatch.setattr(hashlib, "sha256", growing)
    assert hash_file(path) == sha256(first).hexdigest() and path.stat().st_size == len(first) + 4


@pytest.mark.parametrize(
    "change", [lambda card: card.write_text("# Another"), Path.unlink, lambda card: card.write_bytes(b"x" * (1 << 20))]
)
def test_card_that_is_not_the_exported_one_is_left_out(bundle_dir: Path, change: Change) -> None:
    bundle = Bundle.open(bundle_dir)
    change(bundle_dir / CARD_FILE)
    assert bundle.card() == ""
    edit(bundle_dir / MANIFEST_FILE, lambda manifest: (manifest.pop("domain"), manifest["files"].pop(CARD_FILE)))
    other = Bundle.open(bundle_dir)
    assert (other.manifest.domain, other.card(), content_version(other.manifest)) == ("", "", bundle.manifest.version)


def test_tokeniser_larger_than_its_limit_or_the_model_is_refused(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(exported)
    size = (exported / TOKENIZER_FILE).stat().st_size
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", size)
    bundle.tokenizers()
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(BundleError, match=rf"tokenizer\.json: more than {size - 1} bytes"):
        bundle.tokenizers()
    monkeypatch.undo()
    bundle.manifest = msgspec.structs.replace(bundle.manifest, source_vocab_size=279)
    with pytest.raises(BundleError, match="280 tokens, the model room for 279"):
        bundle.tokenizers()


def test_tokenisers_that_the_manifest_does_not_list_are_not_opened(bundle_dir: Path) -> None:
    """No checksum and no signature covers them."""
    source = {"type": "bytes", "eos_id": 1, "offset": 0, "num_extra": 0}
    (bundle_dir / "tokenizer/text.json").write_text(json.dumps({"format_version": 1, "source": source}))
    assert isinstance(Bundle.open(bundle_dir).tokenizers().source, ByteLevelTokenizer)
    shutil.copy(bundle_dir / TOKENIZER_FILE, bundle_dir / "tokenizer/other.json")
    edit(bundle_dir / MANIFEST_FILE, lambda m: m["files"].update({"tokenizer/other.json": m["files"].pop(TOKENIZER_FILE)}))
    with pytest.raises(BundleError, match=r"tokenizer/tokenizer\.json: is not listed"):
        Bundle.open(bundle_dir).tokenizers()
