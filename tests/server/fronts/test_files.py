"""Files that a front end is handed, opened by those who would open the real ones."""

from pathlib import Path

import pytest

from dragoman.server.config import load
from dragoman.server.core.access import read_callers_book
from dragoman.server.faces.tls_files import TlsFiles
from dragoman.server.fronts.files import HandedFiles, read_files


@pytest.mark.parametrize("form", ["web:first\n", '[callers.web]\ntoken = "first"\nmax_requests = 2\n'])
def test_a_file_of_callers_is_read_as_the_real_one_would_be(tmp_path: Path, form: str) -> None:
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


def test_certificates_are_exchanged_with_their_keys(certificates: Path) -> None:
    def contents(name: str) -> dict[str, bytes]:
        files = {"tls_certificate": f"{name}.pem", "tls_key": f"{name}.key", "tls_client_ca": "ca.pem"}
        return {setting: (certificates / file).read_bytes() for setting, file in files.items()}

    handed = HandedFiles(contents("server"))
    paths = handed.paths
    tls = TlsFiles(paths["tls_certificate"], paths["tls_key"], paths["tls_client_ca"])
    assert not tls.reload(), "nothing is new"
    handed.replace(contents("client"))
    assert tls.reload()
    assert tls.contents.certificate == (certificates / "client.pem").read_bytes()
