"""Credentials: the servers that are shown them, and those that are not; addresses without secrets."""

import base64
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import hash_file
from dragoman.model.errors import InputError
from dragoman.server.stores.address import Address, AddressError, client_options
from dragoman.server.stores.store import StoreError
from tests.server.stores.conftest import BIG_FILE, S3, Registry, bring, files, run_registry, run_web
from tests.server.stores.proxy import Proxy, proxy_to

Orders = Callable[..., Any]
SECRET = base64.b64encode(b"reader:secret").decode()


@pytest.mark.parametrize(("how", "shown"), [("token", "bearer a-secret"), ("netrc", f"basic {SECRET.lower()}")])
def test_web_server_is_shown_a_token_or_password_and_a_redirection_is_not(
    web_folder: Path, bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch, how: str, shown: str
) -> None:
    shutil.copytree(bundle, web_folder / "tiny")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login reader password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    name, value = ("DRAGOMAN_STORE_TOKEN", "a-secret") if how == "token" else ("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv(name, value)
    with run_web(web_folder) as port, proxy_to(port) as asked, proxy_to(port) as behind:
        asked.redirections[BIG_FILE] = f"http://localhost:{behind.port}"
        bring(f"http://127.0.0.1:{asked.port}/tiny", tmp_path / "here", order())
        assert all(f"authorization: {shown}" in head for head in asked.requests)
        assert len(behind.requests) == 1 and "authorization" not in behind.requests[0]


def test_registry_is_shown_the_password_of_dockers_configuration_and_a_redirection_is_not(
    bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = lambda: pytest.raises(StoreError, match=r"access denied")  # noqa: E731
    with run_registry("secret") as registry, proxy_to(registry.port) as asked, proxy_to(registry.port) as behind:
        registry.push(bundle, "tiny:1")
        address = f"oci://127.0.0.1:{asked.port}/tiny:1"
        with denied():
            bring(address, tmp_path / "here", order())
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        for password, outcome in (("wrong", denied()), ("secret", nullcontext())):
            shown = base64.b64encode(f"reader:{password}".encode()).decode()
            (tmp_path / "config.json").write_text(json.dumps({"auths": {f"127.0.0.1:{asked.port}": {"auth": shown}}}))
            with outcome:
                bring(address, tmp_path / "here", order())
        assert files(tmp_path / "here/tiny/1") == files(bundle)
        asked.redirections[hash_file(bundle / BIG_FILE)] = f"http://localhost:{behind.port}"
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(StoreError, match=rf"{BIG_FILE}: access denied"):
            bring(address, tmp_path / "there", order())
        assert any(f"authorization: basic {SECRET.lower()}" in head for head in asked.requests)
        assert behind.requests and not any("authorization" in head for head in behind.requests)


def test_profile_is_read_as_by_the_tools_of_aws(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put(bundle, "m")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[models]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "models")
    bring("s3://models/m", tmp_path / "here", order())
    assert all("credential=akiaprofile/" in head for head in s3_proxy.requests)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InputError, match=r"\AAWS profile 'nobody': [^\n]*\Z"):
        bring("s3://models/m", tmp_path / "here", order())


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("DRAGOMAN_STORE_TOKEN", "two\nlines", r"\ADRAGOMAN_STORE_TOKEN: not a bearer token\Z"),
        ("NETRC", "{}/netrc", r"netrc: cannot be read as \.netrc"),
        ("SSL_CERT_FILE", "{}/nowhere", r"SSL_CERT_FILE: .*/nowhere: No such file"),
    ],
)
def test_unusable_credentials_are_named(
    tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    (tmp_path / "netrc").write_text("machine of war")
    monkeypatch.setenv(name, value.format(tmp_path))
    with pytest.raises(InputError, match=reason):
        bring("http://127.0.0.1:9/m", tmp_path / "here", order())


NO_ADDRESSES = [
    *("", "s3://", "s3:///m", "https://", "ftp://host/m", "file:///m", "https://host/m#part", "https://host:port/m"),
    *("https://user:hunter2@host/m", "s3://key:hunter2@bucket/m", "oci://user:hunter2@host/name:1"),
    *("https://host/m?X-Amz-Signature=hunter2", "https://host/m.tar?sig=hunter2", "s3://bucket/a\nb", "s3://bucket/\x1b[31m"),
    *("oci://host/name", "oci://host/Name:1", "oci://host/name@sha256:12", f"oci://host/name@md5:{'0' * 64}", "oci://name:1"),
]


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_impossible_address_is_refused_in_one_line_without_its_secrets(text: str) -> None:
    with pytest.raises(AddressError, match=r"\A[^\n\x1b]*\Z") as refused:
        Address.parse(text)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("place", ["ftp://127.0.0.1:9/x?X-Amz-Signature=hidden&", "http://[x?X-Amz-Signature=hidden&"])
def test_impossible_redirection_is_one_line_without_its_signature(
    registry: type[Registry], bundle: Path, tmp_path: Path, order: Orders, place: str
) -> None:
    registry.push(bundle, "redirected:1")
    with proxy_to(registry.port) as proxy:
        proxy.redirections[hash_file(bundle / BIG_FILE)] = place
        with pytest.raises(StoreError) as raised:
            bring(f"oci://127.0.0.1:{proxy.port}/redirected:1", tmp_path / "here", order())
    assert BIG_FILE in str(raised.value) and "hidden" not in str(raised.value) and str(raised.value).isprintable()


def test_endpoint_without_tls_allows_no_web_server_without_and_its_password_is_not_shown(
    s3: S3, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://reader:hidden@127.0.0.1:9")
    allowed = [client_options(Address.parse(f"{scheme}://m/all"), 1.0, 1.0)["allow_http"] for scheme in ("s3", "https", "http")]
    assert allowed == [True, False, True]
    with pytest.raises(StoreError, match=r"http://127\.0\.0\.1:9/models") as raised:
        bring("s3://models/all", tmp_path / "here", order())
    assert "hidden" not in str(raised.value)
