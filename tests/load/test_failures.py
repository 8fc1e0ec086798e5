from dragoman.load.failures import MAX_CHARACTERS, MAX_MESSAGES, OTHERS, Failure, Failures
from dragoman.load.tally import UNSENT, Outcome, Tally


def test_the_most_frequent_come_first() -> None:
    failures = Failures()
    for code, message in (("INTERNAL", "a"), ("UNAVAILABLE", "b"), ("UNAVAILABLE", "b"), ("UNAVAILABLE", "c")):
        failures.add(code, message)
    other = Failures()
    other.add("INTERNAL", "a", 5)
    failures.merge(other)
    assert failures.most_frequent() == [
        Failure("INTERNAL", "a", 6),
        Failure("UNAVAILABLE", "b", 2),
        Failure("UNAVAILABLE", "c", 1),
    ]


def test_messages_are_bounded_in_number_and_length_and_none_is_lost() -> None:
    failures = Failures()
    for number in range(1000):
        failures.add("INVALID_ARGUMENT", f"text: {number} tokens")
    found = failures.most_frequent()
    assert len(found) == MAX_MESSAGES + 1 and sum(failure.num for failure in found) == 1000
    assert found[0] == Failure("INVALID_ARGUMENT", OTHERS, 1000 - MAX_MESSAGES)
    failures = Failures()
    failures.add("INTERNAL", "one\ntwo \x1b[31m" * 10_000)
    (failure,) = failures.most_frequent()
    assert (
        len(failure.message) == MAX_CHARACTERS + 1
        and failure.message.isprintable()
        and failure.message.startswith("one two �[31mone two ")
    )


def test_what_is_counted_has_failed_while_it_counted_and_was_not_provoked() -> None:
    tally = Tally()
    for due, code, is_intended in ((0.5, "EARLY", False), (1.5, "INTERNAL", False), (1.5, "CANCELLED", True), (1.5, UNSENT, False)):
        tally.record(Outcome("unary", False, due, due, code, is_intended=is_intended), {}, 1.0, 2.0)
    assert [(failure.code, failure.message) for failure in tally.failures.most_frequent()] == [
        ("INTERNAL", ""),
        (UNSENT, "not sent: --max-in-flight calls were under way"),
    ]
