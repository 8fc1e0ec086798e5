import subprocess
from pathlib import Path

import pytest

from dragoman.client.certificates import PLAIN, Pem, Tls
from dragoman.model.errors import InputError


def test_without_an_authority_there_is_no_tls() -> None:
    assert PLAIN.read() is None and PLAIN.credentials() is None and PLAIN.options() == {}


def test_files_are_read_as_they_are(certificates: Path) -> None:
    files = [certificates / name for name in ("ca.pem", "client.pem", "client.key")]
    assert Tls(*files).read() == Pem(*(file.read_bytes() for file in files))
    assert Tls(files[0]).read() == Pem(files[0].read_bytes())
    assert Tls(*files).credentials() is not None


def test_the_servers_name_is_an_option_of_the_channel(certificates: Path) -> None:
    assert Tls(certificates / "ca.pem", server_name="a.example").options() == {"grpc.ssl_target_name_override": "a.example"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"certificate": Path("a")}, "--certificate is given without --key"),
        ({"key": Path("a")}, "--key is given without --certificate"),
        ({"authority": Path("a"), "key": Path("b")}, "--key is given without --certificate"),
        ({"certificate": Path("a"), "key": Path("b")}, "go with --ca"),
        ({"server_name": "a"}, "go with --ca"),
    ],
)
def test_an_option_without_the_others_it_needs_is_named(given: dict, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Tls(**given)


@pytest.mark.parametrize(
    ("authority", "certificate", "key", "reason"),
    [
        ("gone", "client.pem", "client.key", "gone: No such file"),
        ("client.key", "client.pem", "client.key", r"client\.key: not a PEM file of certificates"),
        (".", "client.pem", "client.key", "Is a directory"),
        ("ca.pem", "gone", "client.key", "gone: No such file"),
        ("ca.pem", "client.key", "client.key", r"client\.key: not a PEM file of certificates"),
        ("ca.pem", "client.pem", "gone.key", r"gone\.key: No such file"),
        ("ca.pem", "client.pem", "ca.pem", r"ca\.pem: not a PEM file of a private key"),
        ("ca.pem", "client.pem", "server.key", r"server\.key: not the key of .*client\.pem"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(certificates: Path, authority: str, certificate: str, key: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Tls(*(certificates / name for name in (authority, certificate, key))).read()


def test_a_key_with_a_password_is_refused_without_a_question(certificates: Path, tmp_path: Path) -> None:
    command = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", certificates / "client.key", "-out", tmp_path / "key"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(InputError, match=r"key: not a PEM file of a private key without a password"):
        Tls(certificates / "ca.pem", certificates / "client.pem", tmp_path / "key").read()
