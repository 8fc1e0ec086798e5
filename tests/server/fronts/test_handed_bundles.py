"""What front ends read of bundles: copied once, right whatever becomes of the folder, gone with the last who needs it."""

import json
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.fronts.handed_bundles import HandedBundles, open_handed
from tests.server.repository.copies import copy


@pytest.fixture
def bundle(tmp_path: Path, tiny_bundle: Path) -> Bundle:
    return Bundle.open(copy(tiny_bundle, tmp_path / "models" / "1", "tiny"))


@pytest.fixture
def handed(tmp_path: Path) -> HandedBundles:
    return HandedBundles(tmp_path / "handed")


def test_a_copy_is_the_bundle_to_who_reads_texts(handed: HandedBundles, bundle: Bundle) -> None:
    handed.add(bundle)
    copied = open_handed(handed.folder_of(bundle))
    assert (copied.manifest, copied.digest) == (bundle.manifest, bundle.digest)
    text = "Ein Hund."
    assert copied.tokenizers().source.encode(text) == bundle.tokenizers().source.encode(text)
    assert not copied.encoder_path.exists(), "weights and graphs are the engines' business"


def test_it_is_deleted_with_the_last_who_needs_it(handed: HandedBundles, bundle: Bundle) -> None:
    handed.add(bundle)
    (bundle.directory / "bundle.json").unlink()
    handed.add(bundle)  # of what is there already nothing is read again
    handed.remove(bundle)
    assert open_handed(handed.folder_of(bundle)).digest == bundle.digest
    handed.remove(bundle)
    assert not handed.folder_of(bundle).exists()
    with pytest.raises(BundleError, match=r"bundle\.json"):
        handed.add(bundle)
    assert not handed.folder_of(bundle).exists()


def test_files_that_are_others_meanwhile_are_not_handed_out(handed: HandedBundles, bundle: Bundle) -> None:
    manifest = bundle.directory / "bundle.json"
    content = manifest.read_bytes()
    manifest.write_text(json.dumps(json.loads(content) | {"name": "another"}))
    with pytest.raises(BundleError, match="is not the one"):
        handed.add(bundle)
    manifest.write_bytes(content)
    (tokenizer, *_) = (bundle.directory / "tokenizer").iterdir()
    tokenizer.write_bytes(b"?" * tokenizer.stat().st_size)
    with pytest.raises(BundleError, match="SHA-256"):
        handed.add(bundle)
    assert not handed.folder_of(bundle).exists()
