import asyncio
import os
import re
import shutil
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from dragoman.server.config import ConfigError
from dragoman.server.faces.grpc.tls import peer_names
from dragoman.server.faces.tls_files import TlsFiles
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.certificates import make_certificates, openssl

NAMES = {
    "server": "DNS:localhost,IP:127.0.0.1",
    "many": "email:ops@example.org,IP:10.0.0.1,URI:spiffe://example.org/web,DNS:web.example.org,DNS:www.example.org",
    "address": "IP:10.0.0.1",
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority and what it signs, with one certificate, `plain`, that has no alternative names."""
    folder = make_certificates(tmp_path_factory.mktemp("tls"), NAMES)
    openssl(folder, "req", "-new", "-key", "many.key", "-subj", "/CN=plain", "-out", "plain.csr")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl(folder, "x509", "-req", "-in", "plain.csr", *signing, "-out", "plain.pem")
    return folder


async def seen_names(folder: Path, name: str, key: str) -> tuple[str, ...]:
    """Return the names that a real server sees of a client with this certificate."""
    seen: list[tuple[str, ...]] = []

    async def look(_: bytes, context: Any) -> bytes:
        seen.append(peer_names(context))
        return b""

    read = {file: (folder / file).read_bytes() for file in ("ca.pem", "server.key", "server.pem", f"{name}.pem", f"{key}.key")}
    server = grpc.aio.server()
    handlers = {"Look": grpc.unary_unary_rpc_method_handler(look)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    pair = (read["server.key"], read["server.pem"])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], read["ca.pem"], require_client_auth=True))
    await server.start()
    credentials = grpc.ssl_channel_credentials(read["ca.pem"], read[f"{key}.key"], read[f"{name}.pem"])
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        await channel.unary_unary("/test/Look")(b"", timeout=10)
    await server.stop(None)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "key", "names"),
    [
        ("many", "many", ("web.example.org", "www.example.org", "spiffe://example.org/web", "ops@example.org")),
        ("plain", "many", ("plain",)),
        ("address", "address", ()),
    ],
)
def test_names_of_a_client_are_those_of_its_certificate(certificates: Path, name: str, key: str, names: tuple[str, ...]) -> None:
    assert asyncio.run(seen_names(certificates, name, key)) == names


def test_a_client_without_a_certificate_has_no_names() -> None:
    assert peer_names(SimpleNamespace(auth_context=lambda: {"security_level": [b"TSI_SECURITY_NONE"]})) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [b"", b"a\nb", b"a\0b", b"\xff"])
def test_names_that_nobody_can_read_are_left_out(name: bytes) -> None:
    shown = {"x509_subject_alternative_name": [name, b"good"], "peer_dns": [name, b"good"], "x509_common_name": [b"other"]}
    assert peer_names(SimpleNamespace(auth_context=lambda: shown)) == ("good",)  # type: ignore[arg-type]


# --- files that are exchanged


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make another authority, with a server and a client, and of its server certificates out of their dates."""
    folder = make_certificates(tmp_path_factory.mktemp("others"), {"server": NAMES["server"], "many": NAMES["many"]})
    for name, begin, end in (("expired", "20200101000000Z", "20200102000000Z"), ("future", "20900101000000Z", "20900102000000Z")):
        openssl(folder, "req", "-new", "-key", "server.key", "-subj", f"/CN={name}", "-out", "late.csr")
        (folder / "late.cnf").write_text(
            "[ca]\ndefault_ca=a\n[a]\ndatabase=index\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
        )
        (folder / "index").write_text("")
        (folder / "serial").write_text("01\n")
        signing = ("-cert", "ca.pem", "-keyfile", "ca.key", "-startdate", begin, "-enddate", end, "-batch", "-notext")
        openssl(folder, "ca", "-config", "late.cnf", "-in", "late.csr", *signing, "-out", f"{name}.pem")
    (folder / "usage").write_text("extendedKeyUsage=clientAuth\n")
    openssl(folder, "req", "-new", "-key", "server.key", "-subj", "/CN=usage", "-out", "usage.csr")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "usage")
    openssl(folder, "x509", "-req", "-in", "usage.csr", *signing, "-out", "usage.pem")
    return folder


@pytest.fixture
def mounted(certificates: Path, tmp_path: Path) -> Path:
    """Return a folder with what the server is told to use, which a test may change."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount(folder, certificates)
    return folder


def mount(folder: Path, source: Path) -> None:
    for name in ("server.pem", "server.key", "ca.pem"):
        shutil.copyfile(source / name, folder / name)


def settings(folder: Path) -> dict[str, Path]:
    return {"tls_certificate": folder / "server.pem", "tls_key": folder / "server.key", "tls_client_ca": folder / "ca.pem"}


def tls_files(folder: Path) -> TlsFiles:
    return TlsFiles(*settings(folder).values())


def secure_channel(port: int, authority: Path, client: Path) -> grpc.aio.Channel:
    """Return a channel, on a connection of its own, of a client that trusts an authority and shows a client's certificate."""
    keys = (client / "many.key").read_bytes(), (client / "many.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), *keys)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, [("grpc.use_local_subchannel_pool", 1)])


async def call(channel: grpc.aio.Channel) -> str:
    return str((await GenerationStub(channel).Generate(GenerateRequest(text="a"), timeout=30)).text)


def test_new_connections_get_the_new_certificate_and_old_ones_live_on(
    serve: Any, certificates: Path, others: Path, mounted: Path
) -> None:
    """The authority of clients changes with it."""

    async def run() -> None:
        async with serve(**settings(mounted)) as world:
            tls, port = world.server.face.tls, world.server.port
            async with secure_channel(port, certificates, certificates) as old:
                assert await call(old)
                mount(mounted, others)
                assert tls.reload()
                assert await call(old)
                async with secure_channel(port, others, others) as new:
                    assert await call(new)
                for authority, client in ((certificates, others), (others, certificates)):
                    async with secure_channel(port, authority, client) as mixed:
                        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                            await call(mixed)
                assert await call(old)
                mount(mounted, certificates)
                assert tls.reload()
                async with secure_channel(port, certificates, certificates) as back:
                    assert await call(back)

    asyncio.run(run())


def test_an_exchange_under_load_fails_no_call(serve: Any, certificates: Path, others: Path, mounted: Path, tmp_path: Path) -> None:
    """Clients that trust both authorities call all along, half of them on a new connection each time."""

    async def run() -> None:
        both = tmp_path / "both"
        shutil.copytree(certificates, both)
        (both / "ca.pem").write_bytes((certificates / "ca.pem").read_bytes() + (others / "ca.pem").read_bytes())
        async with serve(**settings(mounted)) as world:
            shutil.copyfile(both / "ca.pem", mounted / "ca.pem")
            tls, port = world.server.face.tls, world.server.port
            tls.reload()
            is_over = asyncio.Event()

            async def keep_calling(is_new_each_time: bool) -> int:
                channel, answers = secure_channel(port, both, both), 0
                while not is_over.is_set():
                    answers += bool(await call(channel))
                    if is_new_each_time:
                        await channel.close()
                        channel = secure_channel(port, both, both)
                await channel.close()
                return answers

            callers = [asyncio.create_task(keep_calling(number % 2 == 0)) for number in range(4)]
            for source in (others, certificates) * 3:
                answered = world.records().get(("en-de", "eos"), 0)
                for name in ("server.pem", "server.key"):
                    shutil.copyfile(source / name, mounted / name)
                assert tls.reload()
                while world.records().get(("en-de", "eos"), 0) < answered + 12:
                    await asyncio.sleep(0.005)
            is_over.set()
            assert sum(await asyncio.gather(*callers)) >= 72
            assert set(world.records()) == {("en-de", "eos")}

    asyncio.run(run())


def test_files_that_have_not_changed_are_not_taken_again(certificates: Path) -> None:
    assert not tls_files(certificates).reload()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda folder, other: shutil.copyfile(other / "server.key", folder / "server.key"),
            "tls_certificate, tls_key: .*mismatch",
        ),
        (
            lambda folder, other: shutil.copyfile(other / "server.pem", folder / "server.pem"),
            "tls_certificate, tls_key: .*mismatch",
        ),
        (lambda folder, other: (folder / "server.pem").write_text((other / "server.pem").read_text()[:200]), "server.pem"),
        (lambda folder, other: (folder / "server.key").write_text((folder / "server.key").read_text()[:100]), "server.key"),
        (lambda folder, other: (folder / "server.pem").write_bytes(b""), "server.pem"),
        (lambda folder, other: (folder / "ca.pem").write_bytes(b""), "tls_client_ca: .*ca.pem"),
        (lambda folder, other: (folder / "ca.pem").write_bytes(b"\xff" * 100), "tls_client_ca: .*ca.pem"),
        (lambda folder, other: (folder / "server.pem").unlink(), "tls_certificate: .*server.pem cannot be read: No such file"),
        (lambda folder, other: (folder / "ca.pem").unlink(), "tls_client_ca: .*ca.pem cannot be read: No such file"),
        (
            lambda folder, other: ((folder / "server.key").unlink(), (folder / "server.key").mkdir()),
            "tls_key: .*server.key cannot be read: not a regular file",
        ),
        (
            lambda folder, other: ((folder / "ca.pem").unlink(), os.mkfifo(folder / "ca.pem")),
            "tls_client_ca: .*ca.pem cannot be read: not a regular file",
        ),
    ],
    ids=[
        "key",
        "certificate",
        "half-certificate",
        "half-key",
        "no-pem",
        "no-authority",
        "rubbish",
        "gone",
        "no-ca",
        "folder",
        "pipe",
    ],
)
def test_bad_files_are_named_and_leave_the_old_ones_in_use(
    serve: Any, certificates: Path, others: Path, mounted: Path, change: Any, reason: str
) -> None:
    async def run() -> None:
        async with serve(**settings(mounted)) as world:
            expires = world.server.face.tls.expires
            change(mounted, others)
            with pytest.raises(ConfigError, match=reason):
                world.server.face.tls.reload()
            assert world.server.face.tls.expires == expires
            async with secure_channel(world.server.port, certificates, certificates) as channel:
                assert await call(channel)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("expired", "tls_certificate: .*server.pem: expired on 2020-01-02 00:00:00 UTC"),
        ("future", "tls_certificate: .*server.pem: is not valid before 2090-01-01 00:00:00 UTC"),
        ("usage", "unsuitable certificate purpose"),
    ],
)
def test_a_certificate_that_no_client_would_take_does_not_replace_one_that_serves(
    others: Path, mounted: Path, name: str, reason: str
) -> None:
    tls = tls_files(mounted)
    shutil.copyfile(others / f"{name}.pem", mounted / "server.pem")
    shutil.copyfile(others / "server.key", mounted / "server.key")
    with pytest.raises(ConfigError, match=reason):
        tls.reload()
    assert tls.expires > time.time()


def test_at_the_start_a_certificate_out_of_its_dates_is_warned_of(logged: Any, others: Path, mounted: Path) -> None:
    shutil.copyfile(others / "expired.pem", mounted / "server.pem")
    shutil.copyfile(others / "server.key", mounted / "server.key")
    tls = tls_files(mounted)
    [line] = logged()
    assert line["level"] == "warning" and "expired on 2020-01-02" in line["event"] and line["file"].endswith("server.pem")
    assert tls.expires == ssl.cert_time_to_seconds("Jan 2 00:00:00 2020 GMT")
    mount(mounted, others)
    assert tls.reload(), "a good one is taken at once"
    assert 0 < tls.expires - time.time() <= 2 * 86_400


def test_files_that_change_while_they_are_read_are_not_taken(mounted: Path, others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = tls_files(mounted)
    mount(mounted, others)
    read = TlsFiles._read

    def read_then_change(self: TlsFiles) -> Any:
        contents = read(self)
        with open(mounted / "ca.pem", "a") as file:
            file.write("\n")
        return contents

    monkeypatch.setattr(TlsFiles, "_read", read_then_change)
    with pytest.raises(ConfigError, match="changed while they were read"):
        tls.reload()


def test_what_is_written_between_certificates_does_not_matter(mounted: Path) -> None:
    """Bundles of authorities have their names between them, in all letters."""
    for name in ("ca.pem", "server.pem"):
        (mounted / name).write_text("# F\u0151tan\u00fas\u00edtv\u00e1ny\n" + (mounted / name).read_text() * 2, encoding="utf-8")
    assert re.search("server.pem", str(tls_files(mounted).paths))


def test_paths_are_those_there_are(certificates: Path) -> None:
    pair = certificates / "server.pem", certificates / "server.key"
    assert TlsFiles(*pair).paths == pair
