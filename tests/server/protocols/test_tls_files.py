"""TLS files: which are usable, which replace those in use, and the names in certificates of clients."""

import os
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.protocols.grpc.interceptors import peer_names
from dragoman.server.protocols.tls import TlsFiles
from tests.certificates import make_certificates, openssl

CA = "[ca]\ndefault_ca=a\n[a]\ndatabase=index\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\npolicy=p\n[p]\n"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_certificates(tmp_path_factory.mktemp("tls"), {"server": "DNS:localhost,IP:127.0.0.1"})
    openssl(folder, "ec", "-in", "server.key", "-aes128", "-passout", "pass:word", "-out", "encrypted.key")
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another authority, and certificates of it out of their dates or for another use."""
    folder = make_certificates(tmp_path_factory.mktemp("others"), {"server": "DNS:localhost,IP:127.0.0.1"})
    for name, begin, end in (("expired", "20200101000000Z", "20200102000000Z"), ("future", "20900101000000Z", "20900102000000Z")):
        for file, text in (("late.cnf", CA + "commonName=supplied\n"), ("index", ""), ("serial", "01\n")):
            (folder / file).write_text(text)
        openssl(folder, "req", "-new", "-key", "server.key", "-subj", f"/CN={name}", "-out", "late.csr")
        signing = ("-cert", "ca.pem", "-keyfile", "ca.key", "-startdate", begin, "-enddate", end, "-batch", "-notext")
        openssl(folder, "ca", "-config", "late.cnf", "-in", "late.csr", *signing, "-out", f"{name}.pem")
    (folder / "use").write_text("extendedKeyUsage=clientAuth\n")
    openssl(folder, "req", "-new", "-key", "server.key", "-subj", "/CN=usage", "-out", "usage.csr")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "use")
    openssl(folder, "x509", "-req", "-in", "usage.csr", *signing, "-out", "usage.pem")
    return folder


@pytest.fixture
def mounted(ours: Path, tmp_path: Path) -> Path:
    """The files in use, which a test may change."""
    (tmp_path / "mounted").mkdir()
    return mount(tmp_path / "mounted", ours)


def mount(folder: Path, source: Path, certificate: str = "server.pem") -> Path:
    for name, file in (("server.pem", certificate), ("server.key", "server.key"), ("ca.pem", "ca.pem")):
        shutil.copyfile(source / file, folder / name)
    return folder


def tls_files(folder: Path) -> TlsFiles:
    return TlsFiles(folder / "server.pem", folder / "server.key", folder / "ca.pem")


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    def change(folder: Path, others: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def copied(name: str, size: int | None = None) -> Callable[[Path, Path], object]:
    return lambda folder, others: (folder / name).write_bytes((others / name).read_bytes()[:size])


UNUSABLE = {
    "another key": (copied("server.key"), "tls_certificate, tls_key: .*mismatch"),
    "half a certificate": (copied("server.pem", 200), "server.pem"),
    "no authority": (copied("ca.pem", 0), "tls_client_ca: .*ca.pem"),
    "rubbish": (replaced("ca.pem", lambda path: path.write_bytes(b"\xff" * 100)), "tls_client_ca: .*ca.pem"),
    "gone": (replaced("server.pem", lambda path: None), "tls_certificate: .*server.pem cannot be read: No such file"),
    "folder": (replaced("server.key", Path.mkdir), "tls_key: .*server.key cannot be read: not a regular file"),
    "pipe": (replaced("ca.pem", os.mkfifo), "tls_client_ca: .*ca.pem cannot be read: not a regular file"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_files_are_named_at_the_start_and_replace_none_in_use(mounted: Path, others: Path, kind: str) -> None:
    change, reason = UNUSABLE[kind]
    tls = tls_files(mounted)
    contents, expires = tls.contents, tls.expires
    assert not tls.reload(), "nothing has changed"
    change(mounted, others)
    for load in (tls.reload, lambda: tls_files(mounted)):
        with pytest.raises(ConfigError, match=reason):
            load()
    assert (tls.contents, tls.expires) == (contents, expires)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("expired", "tls_certificate: .*server.pem: expired on 2020-01-02 00:00:00 UTC"),
        ("future", "tls_certificate: .*server.pem: is not valid before 2090-01-01 00:00:00 UTC"),
        ("usage", "unsuitable certificate purpose"),
    ],
)
def test_a_certificate_that_clients_refuse_does_not_replace_one_in_use(others: Path, mounted: Path, name: str, reason: str) -> None:
    tls = tls_files(mounted)
    mount(mounted, others, f"{name}.pem")
    with pytest.raises(ConfigError, match=reason):
        tls.reload()
    assert tls.expires > time.time()


def test_at_the_start_a_certificate_out_of_its_dates_is_warned_of(logged: Any, others: Path, mounted: Path) -> None:
    tls = tls_files(mount(mounted, others, "expired.pem"))
    [line] = logged()
    assert line["level"] == "warning" and "expired on 2020-01-02" in line["event"] and line["file"].endswith("server.pem")
    assert tls.expires == ssl.cert_time_to_seconds("Jan 2 00:00:00 2020 GMT")
    mount(mounted, others)
    assert tls.reload() and 0 < tls.expires - time.time() <= 2 * 86_400


def test_a_key_that_needs_a_password_is_refused(ours: Path) -> None:
    with pytest.raises(ConfigError, match="encrypted"):
        TlsFiles(ours / "server.pem", ours / "encrypted.key")


def test_settings_without_files_have_no_tls_and_text_between_certificates_is_ignored(ours: Path, mounted: Path) -> None:
    """Bundles of authorities have their names between them, in all letters."""
    assert TlsFiles.of(ServerConfig(models=ours)) is None
    pair = {"tls_certificate": ours / "server.pem", "tls_key": ours / "server.key"}
    found = TlsFiles.of(ServerConfig(models=ours, **pair))
    assert found is not None and found.paths == tuple(pair.values())
    for name in ("ca.pem", "server.pem"):
        text = (mounted / name).read_text()
        (mounted / name).write_text("# F\u0151tan\u00fas\u00edtv\u00e1ny\n" + text * 2, encoding="utf-8")
    assert tls_files(mounted).paths == tuple(mounted / name for name in ("server.pem", "server.key", "ca.pem"))


@pytest.mark.parametrize("name", [b"", b"a\nb", b"a\0b", b"\xff"])
def test_unreadable_names_of_clients_are_left_out(name: bytes) -> None:
    shown = {"x509_subject_alternative_name": [name, b"good"], "peer_dns": [name, b"good"], "x509_common_name": [b"other"]}
    for context, expected in ((shown, ("good",)), ({"security_level": [b"TSI_SECURITY_NONE"]}, ())):
        assert peer_names(SimpleNamespace(auth_context=lambda context=context: context)) == expected  # type: ignore[arg-type]
