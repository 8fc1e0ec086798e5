import json
import math

import grpc
import pytest

from dragoman.client.retry import RetryPolicy
from dragoman.client.settings import Settings
from dragoman.client.sync import Client


@pytest.fixture
def settings(clock):
    def build(**changes):
        return Settings(
            **{
                "target": "x:1",
                "timeout_seconds": 60.0,
                "retry": RetryPolicy(),
                "token": None,
                "options": {},
                "clock": clock,
                **changes,
            }
        )

    return build


def test_calls_are_balanced_over_all_addresses(settings) -> None:
    config = json.loads(dict(settings().channel_options())["grpc.service_config"])
    assert config == {"loadBalancingConfig": [{"round_robin": {}}]}


def test_idle_connections_are_not_pinged(settings) -> None:
    options = dict(settings().channel_options())
    assert options["grpc.keepalive_permit_without_calls"] == 0
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] < 60_000


def test_callers_options_replace_ours_and_join_them(settings) -> None:
    options = settings(options={"grpc.keepalive_time_ms": 5, "grpc.primary_user_agent": "me"}).channel_options()
    assert ("grpc.keepalive_time_ms", 5) in options and ("grpc.primary_user_agent", "me") in options
    assert len(options) == len(dict(options))


def test_token_is_never_printed(settings) -> None:
    assert "s3cret" not in repr(settings(token="s3cret"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("target", ""),
        ("timeout_seconds", 0.0),
        ("timeout_seconds", float("nan")),
        ("timeout_seconds", 1e10),
        ("token", ""),
        ("token", "a b"),
        ("token", "ä\n"),
    ],
)
def test_impossible_setting_is_named(settings, setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{setting}: ") as caught:
        settings(**{setting: value})
    assert setting != "token" or not value or str(value) not in str(caught.value)


def test_calls_are_balanced_over_two_servers(server, clock) -> None:
    other = type(server)()
    other.start()
    try:
        with Client(f"ipv4:{server.target},{other.target}", clock=clock, wait=clock.wait) as client:
            while not (server.service.requests and other.service.requests):  # the second may connect after the first call
                client.generate("x")
    finally:
        other.stop()


def test_tls_channel_does_not_talk_to_a_plain_server(server, clock) -> None:
    with Client(server.target, credentials=grpc.ssl_channel_credentials(), clock=clock, wait=clock.wait) as client:
        assert client.is_ready() is False


def test_deadline_is_on_the_clock_and_may_be_never(settings, clock) -> None:
    assert settings().deadline(5.0) == clock.now + 5.0
    assert settings().deadline(None) == math.inf
    with pytest.raises(ValueError, match=r"^timeout_seconds: "):
        settings().deadline(0.0)
