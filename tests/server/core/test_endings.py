"""What callers are told of endings that are no answers."""

from unittest.mock import Mock

import pytest

from dragoman.server.core.calls import Call
from dragoman.server.core.endings import raise_pair_ending
from dragoman.server.engine.messages import Scored
from dragoman.server.errors import Unavailable


def test_a_model_that_cannot_score_yet_says_when_to_come_again() -> None:
    with pytest.raises(Unavailable) as caught:
        raise_pair_ending(Scored(1, "not_loaded", [], b"", 0.0, retry_after_seconds=4.0), Call("/a.B/C", Mock()))
    assert caught.value.retry_after_seconds == 4.0
