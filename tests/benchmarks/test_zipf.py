"""The judge of many models of which few fit: what counts as an answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

from benchmarks.zipf.asked import OK, Asked, Mix, _call, _time
from benchmarks.zipf.main import verdicts

MIX = Mix(["one", "two"], 1.0, 10.0, 1.0, 5.0)


class Stub:
    """Answers everything as one model."""

    def __init__(self, model: str, num_messages: int = 2) -> None:
        self._model, self._num_messages = model, num_messages

    async def Generate(self, request: Any, timeout: float) -> Any:
        return SimpleNamespace(model=self._model)

    Score = Generate

    async def GenerateStream(self, request: Any, timeout: float) -> Any:
        for left in reversed(range(self._num_messages)):
            yield SimpleNamespace(result=SimpleNamespace(model="" if left else self._model))


def asked(stub: Stub) -> Asked:
    found = Asked([[] for _ in MIX.models], num_sent=3)

    async def ask() -> None:
        for kind in ("unary", "stream", "score"):
            await _time(_call(stub, kind, "two", "a dog", 5.0), found, 1, "two")

    asyncio.run(ask())
    return found


def is_kept(found: Asked) -> bool:
    watch: Any = SimpleNamespace(max_engine_bytes=0)
    (none_failed, _), *others = verdicts(found, watch, 0, {"restarts": 0}, 0)
    assert all(is_kept for is_kept, _ in others)
    return none_failed


def test_answers_of_the_model_that_was_asked_count() -> None:
    found = asked(Stub("two"))
    assert found.ended == {OK: 3} and [len(times) for times in found.seconds] == [0, 3] and is_kept(found)


def test_answers_of_another_model_and_streams_without_one_are_failures() -> None:
    assert asked(Stub("one")).ended == {"answered by one": 3}
    empty = asked(Stub("two", num_messages=0))
    assert empty.ended == {OK: 2, "answered by nobody": 1}
    assert not is_kept(asked(Stub("one"))) and not is_kept(empty)


def test_a_request_without_an_end_is_lost() -> None:
    found = asked(Stub("two"))
    found.num_sent = 4
    assert found.num_lost == 1 and not is_kept(found)


def test_the_model_of_rank_r_is_asked_for_in_proportion_to_one_in_r() -> None:
    assert MIX.weights() == [2 / 3, 1 / 3]
