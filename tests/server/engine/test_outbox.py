"""Reports: to each front end its own, once."""

from dragoman.server.engine.messages import Report, Request, Shrunk, Statistics, Tokens
from dragoman.server.engine.outbox import Outbox
from dragoman.server.engine.sequence import Sequence

STATISTICS = Statistics(num_waiting=3)


def sequence(origin: bytes, request_id: int) -> Sequence:
    return Sequence(origin, Request(request_id, [5], 1, 0.0))


def test_each_front_end_gets_its_own_news_in_order_and_once() -> None:
    outbox, ours, theirs = Outbox(), sequence(b"ours", 1), sequence(b"theirs", 1)
    outbox.add_tokens(ours, [4])
    outbox.add_tokens(theirs, [9])
    outbox.add_tokens(ours, [5, 6])
    end = ours.finished("eos", 1.0)
    outbox.add_finished(ours, end)
    assert outbox.take([], STATISTICS) == {
        b"ours": Report([Tokens(1, [4]), Tokens(1, [5, 6])], [end], STATISTICS),
        b"theirs": Report([Tokens(1, [9])], [], STATISTICS),
    }
    assert outbox.take([], STATISTICS) == {}


def test_who_has_something_running_hears_of_the_step() -> None:
    outbox = Outbox()
    running = [sequence(b"ours", 1), sequence(b"ours", 2)]
    assert outbox.take(running, STATISTICS) == {b"ours": Report([], [], STATISTICS)}


def test_a_report_is_not_changed_by_what_follows() -> None:
    outbox, ours = Outbox(), sequence(b"ours", 1)
    outbox.add_tokens(ours, [4])
    report = outbox.take([ours], STATISTICS)[b"ours"]
    outbox.add_tokens(ours, [5])
    outbox.add_finished(ours, ours.finished("eos", 1.0))
    assert report == Report([Tokens(1, [4])], [], STATISTICS)


def test_slots_that_were_given_back_are_reported_with_the_next_step() -> None:
    outbox, ours = Outbox(), sequence(b"ours", 1)
    ours.num_slots = 3
    outbox.add_shrunk(ours)
    assert not outbox.has_news, "nobody waits for it"
    assert outbox.take([ours], STATISTICS) == {b"ours": Report([], [], STATISTICS, shrunk=[Shrunk(1, 3)])}
    assert outbox.take([ours], STATISTICS) == {b"ours": Report([], [], STATISTICS)}
