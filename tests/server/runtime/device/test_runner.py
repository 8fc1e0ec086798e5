"""The device runner on host memory gives the CPU runner's bits, whatever is admitted, moved, begun ahead or done in parts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.export.bundle import Bundle
from dragoman.server.engine.engine import Engine
from dragoman.server.engine.messages import Finished, Request, Sampling, SearchOptions
from dragoman.server.engine.search.hypothesis import TargetSide
from dragoman.server.engine.settings import Limits
from dragoman.server.runtime.device.cache import SHRINK_PATIENCE
from dragoman.server.runtime.device.device import DeviceError, HostDevice, OutOfDeviceMemory
from dragoman.server.runtime.device.model import Buckets, DeviceModel
from dragoman.server.runtime.device.runner import DeviceRunner
from dragoman.server.runtime.onnx import OnnxRunner
from dragoman.server.runtime.runner import Runner

MAX_ROWS, START, EOS = 6, 2, 1
Make = Callable[..., DeviceRunner]


class Pair:
    """The same calls for both runners, which must answer alike to the last bit."""

    def __init__(self, device_runner: DeviceRunner, cpu_runner: OnnxRunner) -> None:
        self.runners: tuple[Runner, Runner] = device_runner, cpu_runner
        self.tokens = np.zeros(MAX_ROWS, np.int64)
        self.positions = np.zeros(MAX_ROWS, np.int64)
        self.num_rows = 0

    def admit(self, sources: list[list[int]]) -> None:
        rows = list(range(self.num_rows, self.num_rows + len(sources)))
        for runner in self.runners:
            runner.prefill(sources, rows[::-1])
        self.tokens[rows], self.positions[rows] = START, 0
        self.num_rows += len(sources)

    def steps(self, count: int, num_candidates: int = 1) -> None:
        for _ in range(count):
            self.step(num_candidates)

    def step(self, num_candidates: int) -> None:
        tokens, positions = self.tokens[: self.num_rows], self.positions[: self.num_rows]
        found, expected = (runner.step(tokens, positions, num_candidates) for runner in self.runners)
        np.testing.assert_array_equal(found.ids, expected.ids)
        assert found.log_probs.tobytes() == expected.log_probs.tobytes()
        if num_candidates > 1:
            self.refetch(expected.ids.copy(), expected.log_probs.copy())
        self.tokens[: self.num_rows] = expected.ids[:, 0]
        self.positions[: self.num_rows] += 1

    def refetch(self, ids: Any, log_probs: Any) -> None:
        """Run all rows of the last step again, and some, with more candidates; the first of them are those of the step."""
        for first in {0, self.num_rows // 2}:
            part = slice(first, self.num_rows)
            for count in (ids.shape[1], 280):
                found = [runner.refetch(self.tokens[part], self.positions[part], count, first) for runner in self.runners]
                for seen in found:
                    np.testing.assert_array_equal(seen.ids[:, : ids.shape[1]], ids[part])
                    assert seen.log_probs[:, : ids.shape[1]].tobytes() == log_probs[part].tobytes()
                assert found[0].log_probs.tobytes() == found[1].log_probs.tobytes()

    def end(self, row: int) -> None:
        self.num_rows -= 1
        if row < self.num_rows:
            self.copy(self.num_rows, row)

    def copy(self, source: int, target: int) -> None:
        for runner in self.runners:
            runner.copy_row(source, target, int(self.positions[source]))
        self.tokens[target], self.positions[target] = self.tokens[source], self.positions[source]


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(make_device_runner: Make, bundle: Bundle) -> MakePair:
    return lambda **settings: Pair(make_device_runner(**settings), OnnxRunner(bundle, MAX_ROWS, 1))


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()


def source(length: int, seed: int = 0) -> list[int]:
    return [*(3 + (seed * 31 + i * 17) % 270 for i in range(length - 1)), EOS]


@pytest.fixture(scope="module")
def shared_runners(bundle: Bundle, model: DeviceModel) -> tuple[DeviceRunner, OnnxRunner]:
    """Runners that many examples use one after the other, as requests do."""
    buckets = Buckets.of(MAX_ROWS, 280, 20, 24, rows=(1, 2, 4), capacities=(4, 8))
    runner = DeviceRunner(HostDevice(), model, buckets, prefill_tokens=48)
    runner.warm_up()  # so that some steps are replayed, and some are not
    return runner, OnnxRunner(bundle, MAX_ROWS, 1)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.lists(st.integers(1, 24), min_size=1, max_size=MAX_ROWS)),
        st.tuples(st.just("step"), st.sampled_from([1, 1, 1, 1, 2, 16, 20, 64, 100, 280])),
        st.tuples(st.just("run"), st.integers(2, 19)),
        st.tuples(st.just("end"), st.integers(0, MAX_ROWS - 1)),
        st.tuples(st.just("branch"), st.integers(0, MAX_ROWS - 1)),
    ),
    min_size=3,
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(operations=OPERATIONS)
def test_bits_are_the_cpu_runners_after_any_operations(
    shared_runners: tuple[DeviceRunner, OnnxRunner], operations: list[tuple[str, Any]]
) -> None:
    pair = Pair(*shared_runners)
    for operation, argument in operations:
        if operation == "admit":
            if pair.num_rows < MAX_ROWS:
                pair.admit([source(length, i) for i, length in enumerate(argument[: MAX_ROWS - pair.num_rows])])
        elif not pair.num_rows:
            continue
        elif operation == "end":
            pair.end(argument % pair.num_rows)
        elif operation == "branch" and pair.num_rows < MAX_ROWS:
            pair.copy(argument % pair.num_rows, pair.num_rows)
            pair.num_rows += 1
        elif operation in ("step", "run"):
            for _ in range(argument if operation == "run" else 1):
                while pair.num_rows and pair.positions[: pair.num_rows].max() == 20:
                    pair.end(int(pair.positions[: pair.num_rows].argmax()))
                if pair.num_rows:
                    pair.step(1 if operation == "run" else argument)


def test_batch_that_goes_on_unchanged_is_begun_ahead(make_pair: MakePair) -> None:
    pair, runner = (made := make_pair()), made.runners[0]
    pair.admit([source(5), source(9), source(2)])
    pair.steps(12)
    assert runner.num_ahead == 7 and runner.num_taken == 6, "four steps have to go on unchanged"
    pair.tokens[1] = 99  # the device did not feed itself this
    pair.step(1)
    assert (runner.num_ahead, runner.num_taken) == (7, 6)
    pair.step(4)
    pair.steps(6)
    assert (runner.num_ahead, runner.num_taken) == (9, 7)
    plain = make_pair(is_ahead=False)
    plain.admit([source(5)])
    plain.steps(20)
    assert plain.runners[0].num_ahead == 0


def test_candidates_stay_until_the_next_step_even_if_one_is_begun_ahead(make_device_runner: Make) -> None:
    runner = make_device_runner()
    runner.prefill([source(5)], [0])
    tokens = np.array([START])
    for position in range(15):
        found = runner.step(tokens, np.array([position]), 1)
        before = found.ids.copy(), found.log_probs.copy()
        runner._device.synchronize()
        assert np.array_equal(found.ids, before[0]) and np.array_equal(found.log_probs, before[1])
        tokens = found.ids[:, 0].copy()


def test_capacities_grow_with_the_rows_and_shrink_after_a_while(pair: Pair) -> None:
    cache = pair.runners[0].cache
    pair.admit([source(3)])
    assert (cache.self_kv.capacity, cache.cross_kv.capacity) == (4, 4)
    pair.admit([source(20)])
    pair.steps(12, 2)
    assert (cache.self_kv.capacity, cache.cross_kv.capacity) == (20, 24)
    pair.end(1)
    pair.end(0)
    pair.admit([source(3)])
    for step in range(SHRINK_PATIENCE + 1):
        assert (cache.self_kv.capacity == 20) == (step < SHRINK_PATIENCE)
        pair.positions[0] = 0
        pair.step(2)
    assert (cache.self_kv.capacity, cache.cross_kv.capacity) == (4, 4)
    pair.steps(12)


def test_too_many_slots_are_refused_with_the_number_that_fits(make_device_runner: Make) -> None:
    plan = make_device_runner().plan
    with pytest.raises(DeviceError, match=r"6 slots need .* at most [34] slots fit \(--max-slots\)"):
        make_device_runner(max_bytes=plan.arena + plan.reserved - 2 * plan.slot_bytes)
    with pytest.raises(DeviceError, match="not even one slot fits"):
        make_device_runner(max_bytes=plan.encoder.weights)
    make_device_runner(max_bytes=plan.arena + plan.reserved)


def test_prefill_that_does_not_fit_is_done_in_parts(pair: Pair, device: Any) -> None:
    device.num_failures = 2
    pair.admit([source(6, i) for i in range(6)])
    pair.steps(5)
    runs = device.num_runs
    pair.num_rows = 0
    pair.admit([source(6, i) for i in range(5)])
    assert device.num_runs - runs == 5, "and so is the next, without another failure"
    device.num_failures = 1
    with pytest.raises(OutOfDeviceMemory):
        pair.runners[0].prefill([source(9)], [5])
    pair.steps(5)


@pytest.mark.parametrize(("num_rows", "num_failures", "num_candidates"), [(5, 2, 1), (6, 1, 16), (5, 2, 280), (6, 1, 280)])
def test_step_that_does_not_fit_is_done_in_parts(
    pair: Pair, device: Any, num_rows: int, num_failures: int, num_candidates: int
) -> None:
    pair.admit([source(3 + i, i) for i in range(num_rows)])
    pair.step(num_candidates)
    device.num_failures = num_failures
    pair.steps(5, num_candidates)
    assert device.num_failures == 0
    device.num_failures = 10
    with pytest.raises(OutOfDeviceMemory):  # a row does not fit alone
        pair.step(num_candidates)
    device.num_failures = 0
    pair.step(num_candidates)


def test_step_ahead_that_does_not_fit_is_left_and_memory_in_use_is_that_of_valid_positions(pair: Pair, device: Any) -> None:
    pair.admit([source(3)])
    pair.steps(9)
    device.num_failures = 1
    pair.step(1)  # was begun ahead; the one after it fails
    assert device.num_failures == 0
    pair.steps(8)
    runner, per_position = pair.runners[0], 2 * 2 * 4 * 8 * 4  # keys and values, layers, heads, width, bytes
    scratch = MAX_ROWS * 24 * 4 * 8 * 4
    assert runner.cache_bytes() == (MAX_ROWS * per_position * (20 + 24) + scratch, per_position * (3 + 18))
    assert runner.cache_bytes()[1] == pair.runners[1].cache_bytes()[1]


def answers(runner: Runner, requests: list[Request]) -> dict[int, Finished]:
    engine = Engine(runner, Limits(MAX_ROWS, 48), TargetSide(280, EOS, START, 20), clock=lambda: 0.0)
    finished: dict[int, Finished] = {}
    for i, request in enumerate(requests):
        engine.submit(request)
        for _ in range(i % 3):
            engine.step()
            finished |= {end.id: end for end in engine.take_report().finished}
    while engine.has_work:
        engine.step()
        finished |= {end.id: end for end in engine.take_report().finished}
    return finished


def test_engine_gives_the_same_answers_on_either_runner(make_device_runner: Make, bundle: Bundle) -> None:
    searches = [
        SearchOptions(),
        SearchOptions(num_beams=3, num_answers=2),
        SearchOptions(sampling=Sampling(5), num_answers=2),
        SearchOptions(no_repeat_ngram_size=1, num_top_log_probs=5),
        SearchOptions(num_beams=2, repetition_penalty=1.5),
    ]
    requests = [Request(i, source(1 + 7 * i % 24, i), 1 + (5 * i) % 20, 0.0, search=searches[i % len(searches)]) for i in range(25)]
    assert answers(make_device_runner(), requests) == answers(OnnxRunner(bundle, MAX_ROWS, 1), requests)
