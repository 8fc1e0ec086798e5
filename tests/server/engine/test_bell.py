"""What wakes an engine's loop."""

import os
import select

import pytest

from dragoman.server.engine.bell import Bell


def has_rung(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_a_bell_is_heard_until_it_is_silenced() -> None:
    bell = Bell()
    assert not has_rung(bell)
    bell.ring()
    bell.ring()
    assert has_rung(bell)
    bell.silence()
    assert not has_rung(bell)
    bell.silence()
    bell.close()


def test_a_bell_that_is_gone_touches_nobody_elses_file() -> None:
    """A pair may be scored after the engine has ended, and descriptors' numbers are given out again."""
    bell = Bell()
    number = bell.fileno()
    bell.close()
    bell.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        assert other == number
        bell.ring()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)
