from collections.abc import Iterator

import pytest

from dragoman.client.health import why_not_serving
from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client


@pytest.fixture
def client(server) -> Iterator[Client]:
    with Client(server.target, retry=RetryPolicy(max_attempts=1)) as client:
        yield client


def why(client: Client, service: str = "") -> str:
    return why_not_serving(client, "here", service, is_tls=False)


def test_a_service_that_serves_has_no_reason_not_to(client, server) -> None:
    server.set_health("", True)
    server.set_health("en-de", True)
    assert why(client) == why(client, "en-de") == ""


def test_a_server_that_says_no_is_told_apart_from_one_that_says_nothing(client, server) -> None:
    server.set_health("", False)
    server.set_health("en-de", False)
    assert why(client) == "here: readiness is not serving, the server says"
    assert why(client, "en-de") == "here: en-de is not serving, the server says"
    server.stop()
    assert why(client).startswith("here: ") and "the server says" not in why(client)


def test_an_unknown_service_is_told_once(client, server) -> None:
    assert why(client, "en-xx") == "here: no service 'en-xx'; there are liveness, readiness and the models by their names"


def test_a_server_that_says_no_may_refuse_other_questions(client, server, service, failing) -> None:
    server.set_health("", False)
    service.script.append(failing("UNAUTHENTICATED", "the token is missing"))
    assert why(client) == "here: readiness is not serving, the server says"


def test_every_other_failure_is_told(client, server) -> None:
    assert why(client, "\ud800").startswith("service: not Unicode text")
