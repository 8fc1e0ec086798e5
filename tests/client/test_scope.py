import threading

import pytest

from dragoman.client.errors import Cancelled
from dragoman.client.scope import Scope


class Call:
    """Notes how often it was cancelled."""

    def __init__(self) -> None:
        self.num_cancels = 0

    def cancel(self) -> None:
        self.num_cancels += 1


def test_cancel_reaches_smaller_scopes_but_not_larger_ones() -> None:
    outer = Scope()
    middle = Scope(outer)
    inner = Scope(middle)
    calls = [Call(), Call(), Call()]
    for scope, call in zip((outer, middle, inner), calls, strict=True):
        scope.add(call)
    middle.cancel()
    assert [call.num_cancels for call in calls] == [0, 1, 1]
    assert (outer.is_cancelled, middle.is_cancelled, inner.is_cancelled) == (False, True, True)


def test_call_that_comes_late_is_cancelled_at_once() -> None:
    scope, call = Scope(), Call()
    scope.cancel()
    scope.add(call)
    assert call.num_cancels == 1


def test_scope_under_one_that_has_ended_has_ended() -> None:
    parent = Scope()
    parent.cancel()
    assert Scope(parent).is_cancelled


def test_call_that_has_ended_is_not_cancelled() -> None:
    scope, call = Scope(), Call()
    with scope.holding(call):
        pass
    scope.cancel()
    assert call.num_cancels == 0


def test_leaving_the_block_cancels_and_forgets() -> None:
    parent, call = Scope(), Call()
    with Scope(parent) as scope:
        scope.add(call)
    assert call.num_cancels == 1
    parent.cancel()
    assert call.num_cancels == 1


def test_sleep_ends_with_the_scope() -> None:
    scope = Scope()
    threading.Timer(0, scope.cancel).start()
    with pytest.raises(Cancelled):
        scope.sleep(60.0)


def test_sleep_uses_the_wait_it_was_given_in_smaller_scopes_too(clock) -> None:
    Scope(Scope(wait=clock.wait)).sleep(3.0)
    assert clock.waits == [3.0]
