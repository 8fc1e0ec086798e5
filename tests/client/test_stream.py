import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from dragoman.client.errors import Cancelled, InternalError

PATIENCE_SECONDS = 60


def test_result_is_there_after_the_last_piece_only(client) -> None:
    stream = client.stream("abcd")
    with pytest.raises(RuntimeError, match="last piece"):
        _ = stream.result
    assert [piece.text for piece in stream] == ["AB", "CD"]
    assert stream.result.text == "ABCD"
    assert list(stream) == []


def test_cancel_reaches_the_server(client, service, held) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)
    stream = client.stream("abcd", request_id="r-1")
    assert next(stream).text == "AB"
    behaviour.wait_until_began()
    stream.cancel()
    behaviour.assert_cancelled()
    with pytest.raises(Cancelled) as caught:
        next(stream)
    assert caught.value.request_id == "r-1"
    assert list(stream) == []


def test_cancel_wakes_a_waiting_reader(client, service, held) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)
    stream = client.stream("abcd")
    next(stream)
    with ThreadPoolExecutor() as threads:
        reader = threads.submit(next, stream)
        behaviour.wait_until_began()
        stream.cancel()
        with pytest.raises(Cancelled):
            reader.result(PATIENCE_SECONDS)


def test_leaving_the_block_cancels(client, service, held) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)
    with client.stream("abcd") as stream:
        assert next(stream).text == "AB"
        behaviour.wait_until_began()
    behaviour.assert_cancelled()


def test_dropping_the_stream_cancels(client, service, held) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)
    stream = client.stream("abcd")
    next(stream)
    behaviour.wait_until_began()
    del stream
    gc.collect()
    behaviour.assert_cancelled()


def test_error_in_the_loop_body_cancels(client, service, held) -> None:
    behaviour = held("middle")
    service.script.append(behaviour)
    with pytest.raises(ZeroDivisionError), client.stream("abcd") as stream:
        for piece in stream:
            behaviour.wait_until_began()
            _ = len(piece.text) / 0
    behaviour.assert_cancelled()


def test_cancel_after_the_end_keeps_the_result(client) -> None:
    with client.stream("abcd") as stream:
        list(stream)
    stream.cancel()
    assert stream.result.text == "ABCD"


def test_call_starts_before_the_first_piece_is_asked_for(client, service, held) -> None:
    behaviour = held()
    service.script.append(behaviour)
    with client.stream("abcd"):
        behaviour.wait_until_began()
    behaviour.assert_cancelled()


def test_failed_stream_stays_ended(client, service, failing) -> None:
    service.script.append(failing("INTERNAL", "incident 7", place="middle"))
    stream = client.stream("abcd")
    next(stream)
    with pytest.raises(InternalError, match="incident 7"):
        next(stream)
    assert list(stream) == []
    with pytest.raises(RuntimeError):
        _ = stream.result


def test_ended_streams_leave_nothing_in_the_client(client, service, failing) -> None:
    list(client.stream("ab"))
    client.stream("ab").cancel()
    service.behaviours["bad"] = failing("INTERNAL")
    with pytest.raises(InternalError):
        list(client.stream("bad"))
    assert client._scope._running == set()
