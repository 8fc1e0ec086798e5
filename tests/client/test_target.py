import ipaddress

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dragoman.client.aio import AsyncClient
from dragoman.client.sync import Client
from dragoman.client.target import grpc_target

PORTS = st.integers(1, 65535)
NAMES = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}", fullmatch=True)
HOSTS = NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(lambda address: f"[{address}]")
REFUSED = {
    "": "is empty",
    "host:": "the port ''",
    "host:0": "the port '0'",
    "host:99999": "the port '99999'",
    "host:-1": "the port '-1'",
    "host:+1": r"the port '\+1'",
    "host:abc": "the port 'abc'",
    "host:８５００": "the port '８５００'",
    "host:8500/path": "the port '8500/path'",
    ":8500": "no host",
    "http://": "no host",
    "http://:8500": "no host",
    "a b": "has a space",
    " host": "has a space",
    "host:8500\n": "has a space",
    "host\x00": "control character",
    "::1": "in brackets",
    "::1:8500": "in brackets",
    "[::1": "not HOST:PORT",
    "[::1]8500": "not HOST:PORT",
    "[]": "not an IPv6 address",
    "[127.0.0.1]:8500": "not an IPv6 address",
    "[::1%a/b]": "network interface",
    "a:1,b:2": "ipv4:ADDRESS:PORT",
    "host/path": "'/' in the host",
    "http://host/path": "has no path",
    "http://host:8500?x=1": "has no path",
    "http://host#x": "has no path",
    "https://host:8500": "does not turn TLS on",
    "grpcs://host:8500": "does not turn TLS on",
    "tcp://host:8500": "tcp:// is not understood",
}


@pytest.mark.parametrize(
    ("target", "wanted"),
    {
        "localhost": "localhost:8500",
        "127.0.0.1": "127.0.0.1:8500",
        "[::1]": "[::1]:8500",
        "[::1]:9": "[::1]:9",
        "[fe80::1%eth0]": "[fe80::1%eth0]:8500",
        "dragoman": "dragoman:8500",
        "my_service.my-space.svc.cluster.local:1": "my_service.my-space.svc.cluster.local:1",
        "http://localhost": "localhost:8500",
        "http://localhost:9/": "localhost:9",
        "HTTP://localhost:9": "localhost:9",
        "grpc://[::1]:9": "[::1]:9",
    }.items(),
)
def test_port_is_ours_where_none_is_named(target: str, wanted: str) -> None:
    assert grpc_target(target) == wanted


@pytest.mark.parametrize(
    "target",
    [
        "dns:///dragoman:8500",
        "dns://8.8.8.8/dragoman",
        "dns:dragoman",
        "unix:/run/a folder/x.sock",
        "unix:///run/x.sock",
        "unix-abstract:x",
        "vsock:1:2",
        "ipv4:10.0.0.1:8500,10.0.0.2:8500",
        "ipv6:[::1]:8500",
        "xds:///dragoman",
    ],
)
@pytest.mark.parametrize("is_secure", [False, True])
def test_targets_of_grpcs_own_schemes_are_left_to_it(target: str, is_secure: bool) -> None:
    assert grpc_target(target, is_secure=is_secure) == target


@given(HOSTS, PORTS, st.sampled_from(["", "http://", "grpc://"]))
def test_host_and_port_arrive_as_they_were_given(host: str, port: int, scheme: str) -> None:
    assert grpc_target(f"{scheme}{host}:{port}") == f"{host}:{port}"
    assert grpc_target(f"{scheme}{host}") == f"{host}:8500"


@given(st.text())
@example("http://a:1/")
@example("[::1]")
def test_whatever_is_given_is_refused_by_name_or_understood_for_good(target: str) -> None:
    try:
        understood = grpc_target(target)
    except ValueError as error:
        assert str(error).startswith("target: ")
    else:
        assert grpc_target(understood) == understood


@given(st.integers().filter(lambda port: not 0 < port < 65536))
def test_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=r"^target: host:-?\d+: the port"):
        grpc_target(f"host:{port}")


@given(st.ip_addresses(v=6))
def test_bare_ipv6_addresses_are_refused(address: ipaddress.IPv6Address) -> None:
    with pytest.raises(ValueError, match="in brackets"):
        grpc_target(str(address))


@pytest.mark.parametrize(("target", "why"), REFUSED.items())
def test_what_is_no_address_is_named_before_any_call(target: str, why: str, running_async) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=rf"(?s)^target: .*{why}"):
            AsyncClient(target)

    with pytest.raises(ValueError, match=rf"(?s)^target: .*{why}"):
        Client(target)
    running_async(main)


@pytest.mark.parametrize("target", [None, b"localhost", 8500])
def test_what_is_no_string_is_a_type_error(target: object) -> None:
    with pytest.raises(TypeError, match=r"^target: a str is wanted"):
        Client(target)


def test_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"^target: .*user name") as caught:
        Client("http://me:s3cret@host")
    assert "s3cret" not in str(caught.value)


def test_https_goes_with_credentials_and_http_without() -> None:
    assert grpc_target("https://host:9", is_secure=True) == "host:9"
    with pytest.raises(ValueError, match=r"^target: http://host: http:// is plain text"):
        Client("http://host", credentials=grpc.ssl_channel_credentials())


def test_url_is_called(server) -> None:
    with Client(f"http://{server.target}/") as client:
        assert client.generate("a").text == "A"
