"""Copies of files and bundles that frontend workers are handed instead of the real ones."""

import json
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.config import load
from dragoman.server.core.access import read_callers_book
from dragoman.server.fronts.files import HandedFiles, read_files
from dragoman.server.fronts.handed_bundles import HandedBundles, open_handed
from tests.server.repository.copies import copy


@pytest.mark.parametrize("form", ["web:first\n", '[callers.web]\ntoken = "first"\nmax_requests = 2\n'])
def test_handed_file_of_callers_is_read_as_the_real_one(tmp_path: Path, form: str) -> None:
    file = tmp_path / "callers.toml" if form.startswith("[") else tmp_path / "callers"
    file.write_text(form)
    config = load({"models": tmp_path, "auth_tokens_file": file})
    handed = HandedFiles(read_files(config, ("auth_tokens_file", "tls_key")))
    assert handed.paths.keys() == {"auth_tokens_file"}
    file.write_text("damaged")
    known = load({"models": tmp_path, "auth_tokens_file": handed.paths["auth_tokens_file"]})
    before = read_callers_book(known)
    assert before is not None and list(before.entries) == ["web"]
    handed.replace({"auth_tokens_file": form.replace("first", "2nd").encode()})
    after = read_callers_book(known)
    assert after is not None and list(after.entries) == ["web"] and after.tokens.keys() != before.tokens.keys()


def test_handed_bundle_reads_texts_as_the_real_one_until_its_last_user_has_gone(tmp_path: Path, tiny_bundle: Path) -> None:
    bundle = Bundle.open(copy(tiny_bundle, tmp_path / "models" / "1", "tiny"))
    handed, manifest = HandedBundles(tmp_path / "handed"), bundle.directory / "bundle.json"
    handed.add(bundle)
    copied = open_handed(handed.folder_of(bundle))
    assert (copied.manifest, copied.digest) == (bundle.manifest, bundle.digest)
    assert copied.tokenizers().source.encode("Ein Hund.") == bundle.tokenizers().source.encode("Ein Hund.")
    assert not copied.encoder_path.exists(), "weights and graphs are for engines"
    content = manifest.read_bytes()
    manifest.unlink()
    handed.add(bundle)  # it is not read again
    handed.remove(bundle)
    assert open_handed(handed.folder_of(bundle)).digest == bundle.digest
    handed.remove(bundle)
    (tokenizer, *_) = (bundle.directory / "tokenizer").iterdir()
    for found, reason in ((None, r"bundle\.json"), (json.loads(content) | {"name": "another"}, "is not the one"), (..., "SHA-256")):
        if found is ...:
            manifest.write_bytes(content)
            tokenizer.write_bytes(b"?" * tokenizer.stat().st_size)
        elif found is not None:
            manifest.write_text(json.dumps(found))
        with pytest.raises(BundleError, match=reason):
            handed.add(bundle)
        assert not handed.folder_of(bundle).exists()
