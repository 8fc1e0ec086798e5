"""What is known of the requests that hold a version."""

import asyncio

import pytest

from dragoman.server.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NotReady,
    QueueFull,
    StepFailed,
    Unavailable,
    UnexpectedFault,
)
from dragoman.server.repository.use import Held, Outcomes, Use


def test_it_is_free_once_nobody_holds_it() -> None:
    async def run() -> None:
        use = Use()
        await use.until_free()
        use.take()
        use.take()
        waiting = asyncio.create_task(use.until_free())
        use.leave(1.0, None)
        await asyncio.sleep(0)
        assert use.num_held == 1 and not waiting.done()
        use.leave(2.0, None)
        await waiting
        assert use.outcomes == Outcomes(2, 0, 3.0)

    asyncio.run(run())


def test_who_takes_it_again_before_the_waiter_has_noticed_is_waited_for_by_the_next() -> None:
    async def run() -> None:
        use = Use()
        use.take()
        use.leave(0.0, None)
        use.take()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await use.until_free()

    asyncio.run(run())


FAULTS = [
    Unavailable("the engine ended"),
    StepFailed("generation failed"),
    UnexpectedFault("1"),
    KeyError("token"),
    RuntimeError("?"),
]
NO_FAULTS = [
    NotReady("starting"),
    Draining("ending", 1.0),
    InvalidRequest("text", "is empty"),
    QueueFull("too many"),
    DeadlineExceeded("too late"),
    Cancelled("gone"),
    asyncio.CancelledError(),
    GeneratorExit(),
    ConnectionResetError(),
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_fault_of_what_answers_counts(error: BaseException) -> None:
    assert outcome_of(error) == Outcomes(0, 1, 0.0)


@pytest.mark.parametrize("error", NO_FAULTS, ids=lambda error: type(error).__name__)
def test_what_is_no_fault_of_the_version_does_not(error: BaseException) -> None:
    assert outcome_of(error) == Outcomes()


def outcome_of(error: BaseException) -> Outcomes:
    use = Use()

    async def run() -> None:
        async with Held(lambda: ("model", use)) as model:
            assert (model, use.num_held) == ("model", 1)
            raise error

    with pytest.raises(type(error)):
        try:
            coroutine = run()
            coroutine.send(None)
        except StopIteration:
            pytest.fail("it was swallowed")
    assert use.num_held == 0
    return use.outcomes


def test_what_an_answer_takes_is_counted() -> None:
    use = Use()

    async def run() -> None:
        async with Held(lambda: (1, use)):
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert use.outcomes.num_answered == 1 and use.outcomes.seconds >= 0.01


def test_nothing_is_held_that_could_not_be_chosen() -> None:
    def choose() -> tuple[object, Use]:
        raise InvalidRequest("model", "none")

    async def run() -> None:
        with pytest.raises(InvalidRequest):
            async with Held(choose):
                pytest.fail("there is nothing to hold")

    asyncio.run(run())


def test_outcomes_are_added_and_taken_away() -> None:
    one, both = Outcomes(3, 1, 2.5), Outcomes(10, 2, 4.0)
    assert one.plus(both.since(one)) == both
