"""Signatures of bundles, with keys as openssl makes them."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.signing import KeyFileError, Keys, check_signature, key_id, sign
from dragoman.model.errors import InputError
from tests.certificates import openssl

CONTENT = b'{"a manifest": 1}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys `a` and `b`, and what is signed."""
    for name in "ab":
        openssl(tmp_path, "genpkey", "-algorithm", "ed25519", "-out", f"{name}.key")
        openssl(tmp_path, "pkey", "-in", f"{name}.key", "-pubout", "-out", f"{name}.pem")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/bundle.json").write_bytes(CONTENT)
    return tmp_path


def test_what_was_signed_is_believed_and_nothing_else(folder: Path) -> None:
    keys, bundle = Keys.load(folder / "a.pem"), folder / "bundle"
    with pytest.raises(BundleError, match=rf"{bundle}: is not signed"):
        check_signature(bundle, keys)
    sign(bundle / "bundle.json", folder / "a.key")
    assert check_signature(bundle, keys) == CONTENT
    (bundle / "bundle.json").write_bytes(CONTENT + b"\n")
    with pytest.raises(BundleError, match=r"bundle\.json: is not what key [0-9a-f]{64} signed"):
        check_signature(bundle, keys)


def test_the_key_is_named_as_openssl_would(folder: Path) -> None:
    identity = sign(folder / "bundle/bundle.json", folder / "a.key")
    der = subprocess.run(["openssl", "pkey", "-pubin", "-in", folder / "a.pem", "-outform", "DER"], capture_output=True, check=True)
    assert identity == hashlib.sha256(der.stdout).hexdigest()
    assert json.loads((folder / "bundle/bundle.json.sig").read_text())["key"] == identity
    assert list(Keys.load(folder / "a.pem").by_id) == [identity]


def test_openssl_agrees(folder: Path) -> None:
    import base64

    sign(folder / "bundle/bundle.json", folder / "a.key")
    signature = json.loads((folder / "bundle/bundle.json.sig").read_text())["signature"]
    (folder / "raw").write_bytes(base64.b64decode(signature))
    openssl(folder, "pkeyutl", "-verify", "-pubin", "-inkey", "a.pem", "-rawin", "-in", "bundle/bundle.json", "-sigfile", "raw")


def test_an_unknown_key_is_named(folder: Path) -> None:
    identity = sign(folder / "bundle/bundle.json", folder / "b.key")
    with pytest.raises(BundleError, match=rf"bundle\.json: signed with key {identity}, which is not in {folder / 'a.pem'}"):
        check_signature(folder / "bundle", Keys.load(folder / "a.pem"))


def test_a_name_of_a_trusted_key_does_not_help_anothers_signature(folder: Path) -> None:
    keys = Keys.load(folder / "a.pem")
    sign(folder / "bundle/bundle.json", folder / "b.key")
    path = folder / "bundle/bundle.json.sig"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": next(iter(keys.by_id))}))
    with pytest.raises(BundleError, match=r"is not what key"):
        check_signature(folder / "bundle", keys)


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
    ],
)
def test_what_is_no_signature_is_named_in_one_line(folder: Path, content: bytes, reason: str) -> None:
    (folder / "bundle/bundle.json.sig").write_bytes(content)
    with pytest.raises(BundleError, match=rf"\A[^\n]*bundle\.json\.sig: {reason}[^\n]*\Z"):
        check_signature(folder / "bundle", Keys.load(folder / "a.pem"))


def test_a_signature_that_is_no_file_is_named(folder: Path) -> None:
    (folder / "bundle/bundle.json.sig").mkdir()
    with pytest.raises(BundleError, match=r"bundle\.json\.sig: not a regular file"):
        check_signature(folder / "bundle", Keys.load(folder / "a.pem"))


def test_keys_come_from_a_file_of_several_and_from_a_folder(folder: Path) -> None:
    (folder / "keys").mkdir()
    for name in "ab":
        (folder / "keys" / f"{name}.pem").write_bytes((folder / f"{name}.pem").read_bytes())
    (folder / "keys/.hidden").write_text("not a key")
    (folder / "both.pem").write_text("Ours:\n" + (folder / "a.pem").read_text() + (folder / "b.pem").read_text())
    assert Keys.load(folder / "keys").by_id.keys() == Keys.load(folder / "both.pem").by_id.keys()
    assert len(Keys.load(folder / "keys").by_id) == 2


@pytest.mark.parametrize("kind", ["missing", "empty", "empty folder", "text", "binary", "private", "rsa", "cut", "huge", "mixed"])
def test_keys_that_are_none_are_named(folder: Path, kind: str) -> None:
    path = folder / "key"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "mixed":
        path.mkdir()
        (path / "a.pem").write_bytes((folder / "a.pem").read_bytes())
        (path / "README").write_text("keys")
    elif kind == "rsa":
        openssl(folder, "genpkey", "-algorithm", "rsa", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "rsa.key")
        openssl(folder, "pkey", "-in", "rsa.key", "-pubout", "-out", "key")
    elif kind != "missing":
        private, public = (folder / "a.key").read_bytes(), (folder / "a.pem").read_bytes()
        contents = {"empty": b"", "text": b"a key", "binary": b"\xff\x00", "private": private, "cut": public[:60]}
        path.write_bytes({**contents, "huge": public * 1000}[kind])
    with pytest.raises(KeyFileError, match=rf"\A{path}[^\n]*\Z"):
        Keys.load(path)


@pytest.mark.parametrize("kind", ["missing", "public", "encrypted", "rsa", "text"])
def test_a_key_that_cannot_sign_is_named(folder: Path, kind: str) -> None:
    path = folder / "key"
    if kind == "public":
        path.write_bytes((folder / "a.pem").read_bytes())
    elif kind == "encrypted":
        openssl(folder, "pkey", "-in", "a.key", "-aes256", "-passout", "pass:secret", "-out", "key")
    elif kind == "rsa":
        openssl(folder, "genpkey", "-algorithm", "rsa", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "key")
    elif kind == "text":
        path.write_text("a key")
    with pytest.raises(InputError, match=rf"\A{path}[^\n]*\Z"):
        sign(folder / "bundle/bundle.json", path)
    assert not (folder / "bundle/bundle.json.sig").exists()


def test_an_opened_bundle_is_made_of_the_bytes_that_were_signed(
    exported: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is changed at the moment after it was checked; what it said then is what is used."""
    import shutil

    from dragoman.export import bundle as bundles

    bundle = Path(shutil.copytree(exported, folder / "whole"))
    sign(bundle / "bundle.json", folder / "a.key")
    signed = (bundle / "bundle.json").read_bytes()
    name = json.dumps(json.loads(signed)["name"]).encode()
    check: Callable[..., None] = bundles.check_signed

    def check_and_change(*given: object) -> None:
        check(*given)
        (bundle / "bundle.json").write_bytes(signed.replace(name, b'"evil"'))

    monkeypatch.setattr(bundles, "check_signed", check_and_change)
    opened = Bundle.open(bundle, keys=Keys.load(folder / "a.pem"))
    assert f'"{opened.manifest.name}"'.encode() == name
    assert opened.digest == hashlib.sha256(signed).hexdigest()
    with pytest.raises(BundleError, match=r"bundle\.json: is not the one that the server started with"):
        Bundle.open(bundle).refuse_other(opened.digest)
    with pytest.raises(BundleError, match=r"is not the one"):
        opened.check_unchanged()


def test_an_id_is_of_the_public_half(folder: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key((folder / "a.key").read_bytes(), None)
    assert [key_id(key.public_key())] == list(Keys.load(folder / "a.pem").by_id)


def test_what_has_changed_since_it_was_checked_is_not_signed(folder: Path) -> None:
    manifest = folder / "bundle/bundle.json"
    checked = hashlib.sha256(manifest.read_bytes()).hexdigest()
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(InputError, match=r"bundle\.json: has changed since it was checked"):
        sign(manifest, folder / "a.key", checked)
    assert not manifest.with_name("bundle.json.sig").exists()
    sign(manifest, folder / "a.key")
