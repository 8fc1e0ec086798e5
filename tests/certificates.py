"""An authority and what it signs, made with openssl: for tests of TLS."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest


def openssl(folder: Path, *arguments: str) -> None:
    """Run openssl in a folder; without it the test is skipped."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_certificates(folder: Path, names: Mapping[str, str]) -> Path:
    """Write `ca.pem` and, signed by it and valid for two days, a certificate `NAME.pem` for each name; keys end in `.key`.

    Args:
        folder: Where to.
        names: What each certificate is for, as openssl's `subjectAltName` has it, by its name.
    """
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(folder, "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=Test CA", "-days", "2")
    for name, alternatives in names.items():
        (folder / "names").write_text(f"subjectAltName={alternatives}\n")
        openssl(folder, "req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder
