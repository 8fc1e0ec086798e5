"""What callers are told of endings that are no answers."""

import asyncio

import pytest

from dragoman.server.core.calls import Call
from dragoman.server.core.endings import raise_ending, raise_pair_ending
from dragoman.server.engine.messages import Finished, Scored
from dragoman.server.errors import Unavailable


def test_a_model_that_cannot_score_yet_says_when_to_come_again() -> None:
    async def run() -> None:
        scored = Scored(1, "not_loaded", [], b"", 0.0, retry_after_seconds=4.0)
        with pytest.raises(Unavailable) as caught:
            raise_pair_ending(scored, Call.begin("/dragoman.v1.Generation/Score"))
        assert caught.value.retry_after_seconds == 4.0

    asyncio.run(run())


def test_what_was_lost_with_an_engine_may_be_tried_again_at_once() -> None:
    async def run() -> None:
        call = Call.begin("/dragoman.v1.Generation/Generate")
        with pytest.raises(Unavailable, match="engine that had the request ended") as caught:
            raise_ending(Finished(1, "lost", [], 0, None, 0.0, None, 0.0, retry_after_seconds=0.1), call)
        assert caught.value.retry_after_seconds == 0.1
        with pytest.raises(Unavailable) as caught:
            raise_pair_ending(Scored(1, "lost", [], b"", 0.0, retry_after_seconds=0.2), call)
        assert caught.value.retry_after_seconds == 0.2

    asyncio.run(run())
