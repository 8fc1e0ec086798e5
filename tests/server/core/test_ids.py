import pytest

from dragoman.server.core.ids import choose_request_id, new_incident
from dragoman.server.errors import InvalidRequest


def test_the_requests_own_id_goes_before_its_metadatas_and_ours() -> None:
    metadata = (("x-request-id", "theirs"),)
    assert choose_request_id("mine", metadata) == "mine"
    assert choose_request_id("", metadata) == "theirs"
    assert choose_request_id("", (("x-request-id", b"bytes"),)) == "bytes"
    assert choose_request_id("", (("x-request-id", ""),)) != choose_request_id("", None)


def test_an_unfit_id_is_refused_by_where_it_came_from() -> None:
    with pytest.raises(InvalidRequest, match=r"^request_id: "):
        choose_request_id("a\nb", ())
    with pytest.raises(InvalidRequest, match=r"^x-request-id: "):
        choose_request_id("", (("x-request-id", b"\xff"),))


def test_incidents_differ() -> None:
    assert len({new_incident() for _ in range(100)}) == 100
