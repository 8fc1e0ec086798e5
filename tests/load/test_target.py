import pytest

from dragoman.load.target import Target, make_target
from dragoman.model.errors import InputError

HOSTS = {"one": ["10.0.0.1", "fd00::1"], "two": ["10.0.0.2"], "six": ["fd00::6"], "10.0.0.9": ["10.0.0.9"], "fd00::9": ["fd00::9"]}


def lookup(host: str, port: str) -> list[str]:
    if host not in HOSTS:
        raise OSError(-2, "Name or service not known")
    return HOSTS[host]


def test_one_server_is_left_to_grpc() -> None:
    assert make_target("dragoman.example:8500", lookup) == Target("dragoman.example:8500")
    assert make_target("dns:///dragoman:8500", lookup) == Target("dns:///dragoman:8500")
    assert make_target("ipv4:10.0.0.1:1,10.0.0.2:2", lookup) == Target("ipv4:10.0.0.1:1,10.0.0.2:2")


def test_one_server_may_be_without_its_port_and_a_url() -> None:
    assert make_target("localhost", lookup) == make_target("http://localhost/", lookup) == Target("localhost:8500")
    assert make_target("https://localhost", lookup, is_secure=True) == Target("localhost:8500")


def test_several_servers_are_one_target_of_all_addresses() -> None:
    assert make_target("one:1, two:2,10.0.0.9:3", lookup) == Target("ipv4:10.0.0.1:1,10.0.0.2:2,10.0.0.9:3", "one")
    assert make_target("one:1,six:2", lookup) == Target("ipv6:[fd00::1]:1,[fd00::6]:2", "one")
    assert make_target("[fd00::9]:1,six:2", lookup) == Target("ipv6:[fd00::9]:1,[fd00::6]:2", "fd00::9")


def test_an_address_given_twice_is_called_once_a_turn() -> None:
    assert make_target("two:1,two:1", lookup).name == "ipv4:10.0.0.2:1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "one:",
        "one:x",
        "one:99999",
        "http://one/path",
        "https://one",
        "one:1,two",
        "one:1,:2",
        "one:1,two:x",
        "one:1,two:0",
        "one:1,nobody:2",
        "two:1,six:2",
    ],
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(InputError, match="--server"):
        make_target(text, lookup)
