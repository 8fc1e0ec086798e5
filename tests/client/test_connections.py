"""Connections: addresses, channel settings, TLS, balancing, servers that come back, and one line on each that cannot be reached."""

import json
import math
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.client.errors import Unavailable
from dragoman.client.reach import Pem, Tls
from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.client.settings import Settings, grpc_target
from dragoman.model.errors import InputError
from tests.client.fake_server import PATIENCE_SECONDS, FakeServer, failing

ONCE = RetryPolicy(max_attempts=1)
BACKENDS = "connections to all backends failing; last error: "
TARGETS = {
    "localhost": "localhost:8500",
    "[::1]": "[::1]:8500",
    "[fe80::1%eth0]:9": "[fe80::1%eth0]:9",
    "my_service.my-space.svc.cluster.local:1": "my_service.my-space.svc.cluster.local:1",
    "host:65535": "host:65535",
    "http://localhost:9/": "localhost:9",
    "HTTP://localhost": "localhost:8500",
    "grpc://[::1]:9": "[::1]:9",
}
OF_GRPC = ["dns:///a:8500", "dns:a", "unix:/run/a folder/x.sock", "unix-abstract:x", "ipv4:10.0.0.1:1,10.0.0.2:2", "xds:///a"]
WRONG_PORTS = "host: host:0 host:65536 host:+1 host:８５００ host:008500 host:8500/path [::1]8500 [::1]:1:2 a:1,b:2"
WRONG_HOSTS = ":8500 http://:8500 ::1 [::1 [127.0.0.1]:8500 [::1%a/b] host/path http://host/path http://host:8500?x=1"
REFUSED_TARGETS = [*WRONG_PORTS.split(), *WRONG_HOSTS.split(), "https://host:8500", "tcp://host:8500", "a b", "host\x00"]


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_target_is_an_address_a_url_or_one_of_grpcs(is_secure: bool) -> None:
    for target in OF_GRPC:
        assert grpc_target(target, is_secure=is_secure) == target
    for target, wanted in TARGETS.items():
        secure = re.sub(r"^(http|grpc):", r"\1s:", target, flags=re.IGNORECASE)
        assert grpc_target(secure if is_secure else target, is_secure=is_secure) == wanted


@settings(max_examples=20)
@given(st.text() | st.from_regex(r"(http://)?[a-z:\[\]/%.]{1,9}(:[0-9]{1,6})?", fullmatch=True))
@example("http://a:1/")
def test_a_target_is_refused_by_name_or_understood_for_good(target: str) -> None:
    try:
        understood = grpc_target(target)
    except ValueError as error:
        assert str(error).startswith("target: ")
    else:
        assert grpc_target(understood) == understood


def test_a_wrong_target_is_refused_before_any_call(connect) -> None:
    for target in REFUSED_TARGETS:
        with pytest.raises(ValueError, match=r"^target: "):
            connect(target)
    for value, error, reason in (
        ("", ValueError, "is empty"),
        (None, TypeError, "a str is wanted"),
        ("http://me:s3cret@host", ValueError, "user name"),
        ("[::1]:1:2", ValueError, "the port '1:2'"),
        ("https://host", ValueError, "does not turn TLS on"),
    ):
        with pytest.raises(error, match=f"^target: .*{reason}") as caught:
            grpc_target(value)
        assert "s3cret" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^target: http://host: http:// is plain text"):
        connect("http://host", credentials=grpc.ssl_channel_credentials())


def make_settings(**changes: Any) -> Settings:
    values = {"target": "x:1", "timeout_seconds": 60.0, "retry": ONCE, "token": None, "options": {}, "clock": lambda: 1000.0}
    return Settings(**values | changes)


def test_the_callers_channel_options_replace_ours() -> None:
    ours = dict(make_settings().channel_options())
    assert json.loads(ours["grpc.service_config"]) == {"loadBalancingConfig": [{"round_robin": {}}]}
    assert ours["grpc.keepalive_permit_without_calls"] == 0
    assert ours["grpc.keepalive_time_ms"] + ours["grpc.keepalive_timeout_ms"] < 60_000
    theirs = {"grpc.keepalive_time_ms": 5, "grpc.primary_user_agent": "me"}
    assert sorted(make_settings(options=theirs).channel_options()) == sorted((ours | theirs).items())
    assert make_settings(options={"grpc.max_send_message_length": -1}).max_request_bytes == math.inf
    assert make_settings(options={"grpc.max_send_message_length": 0}).max_request_bytes == 0


def test_an_impossible_setting_is_named_and_a_token_never_shown() -> None:
    for setting, wrong, right in (
        ("timeout_seconds", [0.0, -1.0, math.nan, math.inf, 1.1e9], [1e9, 0.1]),
        ("token", ["", "a b", "ä\n", "\x7f"], ["!", "~", None]),
    ):
        for value in wrong:
            with pytest.raises(ValueError, match=f"^{setting}: ") as caught:
                make_settings(**{setting: value})
            assert setting != "token" or not value or value not in str(caught.value)
        for value in right:
            make_settings(**{setting: value})
    assert "s3cret" not in repr(make_settings(token="s3cret"))
    assert (make_settings().deadline(5.0), make_settings().deadline(None)) == (1005.0, math.inf)


def test_calls_are_balanced_over_all_addresses(connect, server) -> None:
    with FakeServer() as other:
        client = connect(f"ipv4:{server.target},{other.target}")
        while not (server.service.requests and other.service.requests):  # the second may connect after the first call
            client.generate("x")
    assert connect(f"http://{server.target}/").generate("a").text == "A"


def test_a_client_recovers_when_the_server_comes_back(connect, server) -> None:
    patient = RetryPolicy(max_attempts=10_000, initial_backoff_seconds=0.02, multiplier=1, jitter=0)
    never_again = {"retry": ONCE, "options": {"grpc.initial_reconnect_backoff_ms": 60_000}}
    hasty, patient = connect(retry=ONCE, is_real=True), connect(retry=patient, is_real=True)
    early, late = connect(**never_again), connect(**never_again)
    assert hasty.generate("one").text == patient.generate("one").text == "ONE"
    server.stop()
    for client in (hasty, early):
        with pytest.raises(Unavailable):
            client.generate("two")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(patient.generate, "three")
        server.start()
        assert call.result(PATIENCE_SECONDS).text == "THREE"
    assert late.generate("four").text == "FOUR", "connections are not shared with a client that waits"


@contextmanager
def serving_tls(certificates: Path, wants_certificate: bool = False) -> Iterator[str]:
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (certificates / "ca.pem").read_bytes(), wants_certificate)
    server = grpc.server(ThreadPoolExecutor(2))
    target = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    yield target
    server.stop(None).wait()


def message_of(connect: Any, target: str, **options: Any) -> str:
    with pytest.raises(Unavailable) as caught:
        connect(target, retry=ONCE, **options).generate("a")
    return str(caught.value)


CLOSED = "the connection was closed at once (%s); is it a Dragoman server, and does it want TLS or a client's certificate?"
REFUSED = "nothing answers there (%sConnection refused); is the server running?"


def test_a_server_that_is_down_is_told_in_one_line_by_every_call(call, connect, server, clock) -> None:
    server.stop()
    calls = {"generate": ["a"], "stream": ["a"], "generate_many": [["a"]], "generate_batch": [[Request("a")]], "score": ["a", "b"]}
    for method, arguments in {**calls, "models": [], "model": ["en-de"]}.items():
        with pytest.raises(Unavailable) as caught:
            call(method, *arguments)
        assert str(caught.value) == f"{server.target}: {REFUSED % ''}"
        assert len(clock.waits) == 4
        clock.waits.clear()
    line = rf"localhost:{server.port}: {re.escape(REFUSED) % f'(127.0.0.1|.::1.):{server.port}: '}"
    assert re.fullmatch(line, message_of(connect, f"http://localhost:{server.port}/"))
    assert re.fullmatch(f"dns:///{line}", message_of(connect, f"dns:///localhost:{server.port}"))


def test_other_ways_not_to_reach_a_server_are_told_in_one_line(connect, server, tmp_path: Path, certificates: Path) -> None:
    unix = f"unix:{tmp_path}/x.sock"
    no_socket = f"{unix}: there is no such socket (No such file or directory); is the server running?"
    assert message_of(connect, "nobody.invalid").startswith("nobody.invalid:8500: the name cannot be looked up (")
    assert message_of(connect, unix) == no_socket
    tls = Tls(certificates / "ca.pem", server_name="server.example")
    ours, named = {"credentials": tls.credentials()}, {"options": tls.options()}
    plain = f"{server.target}: no TLS is spoken there; call it without credentials"
    assert message_of(connect, server.target, **ours) == plain
    assert connect(credentials=tls.credentials()).is_ready() is False
    with serving_tls(certificates) as target:
        with pytest.raises(Exception, match="Method not found"):
            connect(target, **ours, **named).models()
        other = grpc.ssl_channel_credentials((certificates / "client.pem").read_bytes())
        assert message_of(connect, target, credentials=other).startswith(f"{target}: the server's certificate is not trusted (")
        assert "is not for this name; call it by one that" in message_of(connect, target, **ours)
        assert re.fullmatch(re.escape(f"{target}: {CLOSED}") % ".*", message_of(connect, target))
    with serving_tls(certificates, wants_certificate=True) as target:
        assert re.fullmatch(re.escape(f"{target}: {CLOSED}") % ".*", message_of(connect, target, **ours, **named))
        known = Tls(*(certificates / name for name in ("ca.pem", "client.pem", "client.key"))).credentials()
        with pytest.raises(Exception, match="Method not found"):
            connect(target, credentials=known, **named).models()


def test_the_servers_own_words_are_left_as_they_are(call, service) -> None:
    details = f"{BACKENDS}UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused"
    service.script.append(failing("UNAVAILABLE", details, retry_after=(1000, 0)))
    with pytest.raises(Unavailable) as caught:
        call("generate", "x")
    assert str(caught.value) == details


def test_certificate_files_are_read_or_named(certificates: Path) -> None:
    command = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", "client.key", "-out", "locked.key"]
    subprocess.run(command, cwd=certificates, check=True, capture_output=True)
    for files, reason in (
        ("gone client.pem client.key", "gone: No such file"),
        (". client.pem client.key", "Is a directory"),
        ("ca.pem client.key client.key", r"client\.key: not a PEM file of certificates"),
        ("ca.pem client.pem gone.key", r"gone\.key: No such file"),
        ("ca.pem client.pem ca.pem", r"ca\.pem: not a PEM file of a private key"),
        ("ca.pem client.pem server.key", r"server\.key: not the key of .*client\.pem"),
        ("ca.pem client.pem locked.key", r"locked\.key: not a PEM file of a private key without a password"),
    ):
        with pytest.raises(InputError, match=reason):
            Tls(*(certificates / name for name in files.split())).read()
    assert Tls().read() is None and Tls().credentials() is None and Tls().options() == {}
    files = [certificates / name for name in ("ca.pem", "client.pem", "client.key")]
    assert Tls(*files).read() == Pem(*(file.read_bytes() for file in files))
    assert Tls(files[0]).read() == Pem(files[0].read_bytes())
