"""Signatures of bundles, with keys as openssl makes them."""

import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dragoman.export import bundle as bundles
from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.signing import KeyFileError, Keys, check_signed, sign
from dragoman.model.errors import InputError
from tests.certificates import openssl

CONTENT = b'{"a manifest": 1}\n'


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of usable keys `a` and `b`, and of files that are none."""
    folder = tmp_path_factory.mktemp("keys")
    for name, *kind in (("a", "ed25519"), ("b", "ed25519"), ("rsa", "rsa", "-pkeyopt", "rsa_keygen_bits:2048")):
        openssl(folder, "genpkey", "-algorithm", *kind, "-out", f"{name}.key")
        openssl(folder, "pkey", "-in", f"{name}.key", "-pubout", "-out", f"{name}.pem")
    openssl(folder, "pkey", "-in", "a.key", "-aes256", "-passout", "pass:secret", "-out", "encrypted.key")
    public = (folder / "a.pem").read_bytes()
    (folder / "no-keys").mkdir()
    (folder / "mixed").mkdir()
    files = {
        "empty": b"",
        "text": b"a key",
        "binary": b"\xff\x00",
        "cut": public[:60],
        "huge": public * 1000,
        "mixed/a.pem": public,
    }
    for name, content in (files | {"mixed/README": b"keys"}).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def folder(keys: Path, tmp_path: Path) -> Path:
    """A copy of the keys, and a manifest to sign."""
    folder = Path(shutil.copytree(keys, tmp_path / "signing"))
    (folder / "bundle").mkdir()
    (folder / "bundle/bundle.json").write_bytes(CONTENT)
    return folder


def check(bundle: Path, keys: Keys) -> None:
    check_signed(bundle, (bundle / "bundle.json").read_bytes(), keys)


def test_signed_content_is_accepted_and_openssl_agrees(folder: Path) -> None:
    keys, bundle = Keys.load(folder / "a.pem"), folder / "bundle"
    with pytest.raises(BundleError, match=rf"{bundle}: is not signed"):
        check(bundle, keys)
    identity = sign(bundle / "bundle.json", folder / "a.key")
    check(bundle, keys)
    der = subprocess.run(["openssl", "pkey", "-pubin", "-in", folder / "a.pem", "-outform", "DER"], capture_output=True, check=True)
    signed = json.loads((bundle / "bundle.json.sig").read_text())
    assert identity == signed["key"] == hashlib.sha256(der.stdout).hexdigest() and list(keys.by_id) == [identity]
    (folder / "raw").write_bytes(base64.b64decode(signed["signature"]))
    openssl(folder, "pkeyutl", "-verify", "-pubin", "-inkey", "a.pem", "-rawin", "-in", "bundle/bundle.json", "-sigfile", "raw")
    (bundle / "bundle.json").write_bytes(CONTENT + b"\n")
    with pytest.raises(BundleError, match=r"bundle\.json: is not what key [0-9a-f]{64} signed"):
        check(bundle, keys)


def test_signature_of_an_unknown_key_is_refused_also_under_the_name_of_a_trusted_one(folder: Path) -> None:
    keys, path = Keys.load(folder / "a.pem"), folder / "bundle/bundle.json.sig"
    identity = sign(folder / "bundle/bundle.json", folder / "b.key")
    with pytest.raises(BundleError, match=rf"bundle\.json: signed with key {identity}, which is not in {folder / 'a.pem'}"):
        check(folder / "bundle", keys)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": next(iter(keys.by_id))}))
    with pytest.raises(BundleError, match=r"is not what key"):
        check(folder / "bundle", keys)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a signature"),
        (b"\xff\xfe", "not a signature"),
        (b"[" * 4000, "not a signature"),
        (b"[]", "not a signature"),
        (b'{"format_version": 1}', "not a signature"),
        (b'{"format_version":2,"algorithm":"ed25519","key":"%s","signature":"%s=="}' % (b"0" * 64, b"A" * 86), "not a signature"),
        (b'{"format_version":1,"algorithm":"none","key":"%s","signature":"%s=="}' % (b"0" * 64, b"A" * 86), "not a signature"),
        (b'{"format_version":1,"algorithm":"ed25519","key":"%s","signature":""}' % (b"0" * 64), "not a signature"),
        (b'{"format_version":1,"algorithm":"ed25519","key":"../a","signature":"%s=="}' % (b"A" * 86), "not a signature"),
        (b" " * (1 << 12) + b"{", "more than 4096 bytes"),
        (b" " * (1 << 26), "more than 4096 bytes"),
        (None, "not a regular file"),
    ],
)
def test_file_that_is_no_signature_is_named_in_one_line(folder: Path, content: bytes | None, reason: str) -> None:
    if content is None:
        (folder / "bundle/bundle.json.sig").mkdir()
    else:
        (folder / "bundle/bundle.json.sig").write_bytes(content)
    with pytest.raises(BundleError, match=rf"\A[^\n]*bundle\.json\.sig: {reason}[^\n]*\Z"):
        check(folder / "bundle", Keys.load(folder / "a.pem"))


def test_keys_come_from_a_file_of_several_and_from_a_folder(folder: Path) -> None:
    (folder / "keys").mkdir()
    for name in ("a.pem", "b.pem"):
        shutil.copy(folder / name, folder / "keys")
    (folder / "keys/.hidden").write_text("not a key")
    (folder / "both.pem").write_text("Ours:\n" + (folder / "a.pem").read_text() + (folder / "b.pem").read_text())
    assert Keys.load(folder / "keys").by_id.keys() == Keys.load(folder / "both.pem").by_id.keys()
    assert len(Keys.load(folder / "keys").by_id) == 2


@pytest.mark.parametrize("name", ["missing", "empty", "no-keys", "text", "binary", "a.key", "rsa.pem", "cut", "huge", "mixed"])
def test_unusable_key_file_is_named(keys: Path, name: str) -> None:
    with pytest.raises(KeyFileError, match=rf"\A{keys / name}[^\n]*\Z"):
        Keys.load(keys / name)


@pytest.mark.parametrize("name", ["missing", "a.pem", "encrypted.key", "rsa.key", "text"])
def test_key_that_cannot_sign_is_named(folder: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"\A{folder / name}[^\n]*\Z"):
        sign(folder / "bundle/bundle.json", folder / name)
    assert not (folder / "bundle/bundle.json.sig").exists()


def test_opened_bundle_is_made_of_the_bytes_that_were_signed(exported: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is changed at the moment after it was checked; the checked content is used."""
    bundle = Path(shutil.copytree(exported, folder / "whole"))
    sign(bundle / "bundle.json", folder / "a.key")
    signed, check = (bundle / "bundle.json").read_bytes(), bundles.check_signed
    name = json.loads(signed)["name"]

    def check_and_change(*given: Any) -> None:
        check(*given)
        (bundle / "bundle.json").write_bytes(signed.replace(json.dumps(name).encode(), b'"evil"'))

    monkeypatch.setattr(bundles, "check_signed", check_and_change)
    opened = Bundle.open(bundle, keys=Keys.load(folder / "a.pem"))
    assert (opened.manifest.name, opened.digest) == (name, hashlib.sha256(signed).hexdigest())
    with pytest.raises(BundleError, match=r"bundle\.json: is not the one that the server started with"):
        Bundle.open(bundle).refuse_other(opened.digest)
    with pytest.raises(BundleError, match=r"is not the one"):
        opened.check_unchanged()


def test_manifest_that_has_changed_since_it_was_checked_is_not_signed(folder: Path) -> None:
    manifest = folder / "bundle/bundle.json"
    checked = hashlib.sha256(manifest.read_bytes()).hexdigest()
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(InputError, match=r"bundle\.json: has changed since it was checked"):
        sign(manifest, folder / "a.key", checked)
    assert not manifest.with_name("bundle.json.sig").exists()
    sign(manifest, folder / "a.key")
