"""What stores are shown, and who else is not."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.export.bundle import hash_file
from dragoman.model.errors import InputError
from dragoman.server.stores.address import Address, AddressError
from dragoman.server.stores.credentials import client_options
from dragoman.server.stores.pulling import Order, pull
from dragoman.server.stores.store import StoreError
from tests.server.stores.conftest import BIG_FILE, S3, Registry, run_registry, run_web
from tests.server.stores.proxy import proxy_to

Orders = Callable[..., Order]
# Of the password `secret`.
HTPASSWD = "reader:$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n"


def bring(address: str, folder: Path, order: Order) -> None:
    pull(Address.parse(address), folder, order)


@pytest.mark.parametrize("how", ["token", "netrc"])
def test_a_web_server_is_shown_a_token_or_a_password_and_nobody_behind_a_redirection_is(
    web_folder: Path, bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    shutil.copytree(bundle, web_folder / "tiny")
    if how == "token":
        monkeypatch.setenv("DRAGOMAN_STORE_TOKEN", "a-secret")
        shown = "authorization: bearer a-secret"
    else:
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login reader password secret\n")
        (tmp_path / "netrc").chmod(0o600)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        shown = "authorization: basic " + base64.b64encode(b"reader:secret").decode().lower()
    with run_web(web_folder) as port, proxy_to(port) as asked, proxy_to(port) as behind:
        asked.redirections[BIG_FILE] = f"http://localhost:{behind.port}"
        bring(f"http://127.0.0.1:{asked.port}/tiny", tmp_path / "here", order())
        assert all(shown in head for head in asked.requests)
        assert len(behind.requests) == 1 and "authorization" not in behind.requests[0]


def test_a_password_of_a_registry_is_not_shown_behind_a_redirection(
    bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registry").mkdir()
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    passwords = f"auth: {{htpasswd: {{realm: models, path: {tmp_path / 'htpasswd'}}}}}\n"
    with (
        run_registry(tmp_path / "registry", passwords) as registry,
        proxy_to(registry.port) as asked,
        proxy_to(registry.port) as behind,
    ):
        registry.password = "secret"
        registry.push(bundle, "tiny:1")
        shown = base64.b64encode(b"reader:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {f"127.0.0.1:{asked.port}": {"auth": shown}}}))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        layers = json.loads((bundle / "bundle.json").read_text())["files"]
        asked.redirections[layers[BIG_FILE]["sha256"]] = f"http://localhost:{behind.port}"
        with pytest.raises(StoreError, match=rf"{BIG_FILE}: access denied"):
            bring(f"oci://127.0.0.1:{asked.port}/tiny:1", tmp_path / "here", order())
        assert any(f"authorization: basic {shown.lower()}" in head for head in asked.requests)
        assert behind.requests and not any("authorization" in head for head in behind.requests)


def test_a_profile_is_read_as_awss_own_tools_do(
    s3: S3, bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put(bundle, "m")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[models]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "models")
    with proxy_to(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        bring("s3://models/m", tmp_path / "here", order())
        assert all("credential=akiaprofile/" in head for head in proxy.requests)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InputError, match=r"\AAWS profile 'nobody': [^\n]*\Z"):
        bring("s3://models/m", tmp_path / "here", order())


def test_what_cannot_be_shown_is_named(tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_STORE_TOKEN", "two\nlines")
    with pytest.raises(InputError, match=r"\ADRAGOMAN_STORE_TOKEN: not a bearer token\Z"):
        bring("http://127.0.0.1:9/m", tmp_path / "here", order())
    monkeypatch.delenv("DRAGOMAN_STORE_TOKEN")
    (tmp_path / "netrc").write_text("machine of war")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(InputError, match=r"netrc: cannot be read as \.netrc"):
        bring("http://127.0.0.1:9/m", tmp_path / "here", order())
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"SSL_CERT_FILE: .*/nowhere: No such file"):
        bring("http://127.0.0.1:9/m", tmp_path / "here", order())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s3://",
        "s3:///m",
        "https://",
        "ftp://host/m",
        "file:///m",
        "https://user:hunter2@host/m",
        "s3://key:hunter2@bucket/m",
        "https://host/m?X-Amz-Signature=hunter2",
        "https://host/m.tar?sig=hunter2",
        "https://host/m#part",
        "https://host:port/m",
        "oci://host/name",
        "oci://host/Name:1",
        "oci://host/name@sha256:12",
        "oci://host/name@md5:" + "0" * 64,
        "oci://user:hunter2@host/name:1",
        "oci://name:1",
        "s3://bucket/a\nb",
        "s3://bucket/\x1b[31m",
    ],
)
def test_addresses_that_are_none_are_refused_in_one_line_without_their_secrets(text: str) -> None:
    with pytest.raises(AddressError, match=r"\A[^\n\x1b]*\Z") as refused:
        Address.parse(text)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("place", ["ftp://127.0.0.1:9/x?X-Amz-Signature=hidden&", "http://[x?X-Amz-Signature=hidden&"])
def test_a_redirection_to_nowhere_is_one_line_without_its_signature(
    registry: Registry, bundle: Path, tmp_path: Path, order: Orders, place: str
) -> None:
    registry.push(bundle, "redirected:1")
    with proxy_to(registry.port) as proxy:
        proxy.redirections[hash_file(bundle / BIG_FILE)] = place
        with pytest.raises(StoreError) as raised:
            pull(Address.parse(f"oci://127.0.0.1:{proxy.port}/redirected:1"), tmp_path / "here", order())
    assert BIG_FILE in str(raised.value) and "hidden" not in str(raised.value) and str(raised.value).isprintable()


def test_an_endpoint_without_tls_is_no_leave_for_web_servers_to_lead_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    allowed = [
        client_options(Address.parse(f"{scheme}://models/all"), 1.0, 1.0)["allow_http"] for scheme in ("s3", "https", "http")
    ]
    assert allowed == [True, False, True]


def test_a_password_in_an_endpoint_is_not_shown(tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://reader:hidden@127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"http://127\.0\.0\.1:9/models") as raised:
        bring("s3://models/all", tmp_path / "here", order())
    assert "hidden" not in str(raised.value)
