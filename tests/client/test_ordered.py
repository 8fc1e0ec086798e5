import threading

import pytest

from dragoman.client.ordered import PAUSE, in_order
from dragoman.client.scope import Scope

PATIENCE_SECONDS = 60


def double(item: int, scope: Scope) -> int:
    return 2 * item


def test_results_come_in_the_order_of_the_items_whoever_is_done_first() -> None:
    later_is_done = threading.Event()

    def work(item: int, scope: Scope) -> int:
        if item == 0:
            assert later_is_done.wait(PATIENCE_SECONDS)
        if item == 3:
            later_is_done.set()
        return item

    assert list(in_order(range(4), work, Scope(), concurrency=2)) == [0, 1, 2, 3]


def test_pause_yields_what_is_under_way_before_the_next_item_is_read() -> None:
    seen = []

    def items():
        yield 1
        yield 2
        yield PAUSE
        assert seen == [2, 4]
        yield PAUSE
        yield 3

    for result in in_order(items(), double, Scope(), concurrency=32):
        seen.append(result)
    assert seen == [2, 4, 6]


def test_items_that_fail_end_the_results_after_those_before() -> None:
    def items():
        yield from (1, 2)
        raise OSError("disk")

    results = in_order(items(), double, Scope())
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(OSError, match="disk"):
        next(results)


def test_failure_comes_in_its_turn_and_ends_the_scope() -> None:
    scopes = []

    def work(item: int, scope: Scope) -> float:
        scopes.append(scope)
        return 1 / item

    results = in_order([1, 0, 2], work, Scope(), concurrency=1)
    assert next(results) == 1.0
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert scopes[0].is_cancelled
    assert list(results) == []


def test_interrupt_ends_the_work() -> None:
    parent = Scope()
    ended = threading.Event()

    def items():
        yield 1
        raise KeyboardInterrupt

    def work(item: int, scope: Scope) -> int:
        try:
            scope.sleep(PATIENCE_SECONDS)
        finally:
            ended.set()
        return item

    with pytest.raises(KeyboardInterrupt):
        list(in_order(items(), work, parent))
    assert ended.is_set()
    assert not parent.is_cancelled


def test_no_concurrency_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"^concurrency: -1 is"):
        in_order([], double, Scope(), concurrency=-1)
