"""The course of a comparison, with servers that are formulas."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers.server import Settings
from benchmarks.serving import comparison as comparison_module
from benchmarks.serving.comparison import CURVE, OBJECTIVE_FACTOR, Comparison, Size
from benchmarks.serving.contender import Gauge
from benchmarks.serving.goodput import Point

CAPTIONS = ["a dog", "a cat", "two men"]
FULL = Size(seconds=10.0, tuning_seconds=5.0, warm_seconds=1.0, num_rounds=2, num_checked=2)
QUICK = Size(seconds=3.0, tuning_seconds=0.0, warm_seconds=1.0, num_rounds=1, num_checked=2)


@dataclass
class Formula:
    """A server that keeps up with a rung, with delays of 20 ms with one more; its address is its name."""

    name: str
    capacity: int
    unloaded_seconds: float
    kind: object = None
    precision: str = "fp32"
    started: list[Settings | None] = field(default_factory=list)

    @property
    def face(self) -> str:
        return self.name

    @property
    def models(self) -> Any:
        return SimpleNamespace(precision=self.precision)

    @contextlib.contextmanager
    def start(self, settings: Settings | None, sample: str) -> Iterator[Any]:
        self.started.append(settings)
        yield SimpleNamespace(address=self.name)

    def describe(self, settings: Settings | None) -> str:
        return str(settings)


def run_with(
    monkeypatch: pytest.MonkeyPatch, formulas: list[Formula], size: Size, answers: dict[str, list[str]] | None = None
) -> Comparison:
    """Look, tune and run a comparison's rounds."""
    of_name = {formula.name: formula for formula in formulas}

    def point(gauge: Gauge, face: str, address: str, rung: int, objective: float, round_number: int) -> Point:
        settings = of_name[address].started[-1]
        capacity = of_name[address].capacity + (settings is not None and settings.delay_ms == 20)
        seconds = objective if rung <= capacity else 2 * objective
        return Point(rung, float(round_number), seconds, seconds, 0.0, Counter(), 100, 0.1)

    async def translate(face: str, address: str, texts: list[str], concurrency: int) -> list[str]:
        return (answers or {}).get(address, [text.upper() for text in texts])

    monkeypatch.setattr(Gauge, "point", point)
    monkeypatch.setattr(Gauge, "warm_up", lambda gauge, face, address: None)
    monkeypatch.setattr(Gauge, "unloaded_seconds", lambda gauge, face, address: of_name[address].unloaded_seconds)
    monkeypatch.setattr(comparison_module, "translate", translate)
    made: list[Any] = [*formulas]
    comparison = Comparison(made, CAPTIONS, size, 2)
    comparison.look()
    if size.tuning_seconds:
        comparison.tune()
    for number in range(1, size.num_rounds + 1):
        comparison.run_round(number)
    return comparison


def test_the_objective_is_one_for_all_and_a_peer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, slow, fast = Formula("d", 50, 0.01), Formula("p", 40, 0.3, object()), Formula("q", 40, 0.2, object())
    assert run_with(monkeypatch, [ours, slow, fast], QUICK).objective == pytest.approx(OBJECTIVE_FACTOR * 0.2)
    assert run_with(monkeypatch, [ours], QUICK).objective == pytest.approx(OBJECTIVE_FACTOR * 0.01)
    generous = replace(QUICK, objective_factor=10)
    assert run_with(monkeypatch, [ours, slow, fast], generous).objective == pytest.approx(10 * 0.2)


def test_peers_are_tuned_and_every_round_starts_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer = Formula("d", 50, 0.01), Formula("p", 40, 0.02, object())
    comparison = run_with(monkeypatch, [ours, peer], FULL)
    first, second = comparison.standings
    assert [[knee and (knee.rung, knee.goodput) for knee in standing.knees] for standing in (first, second)] == [
        [(50, 1.0), (50, 2.0)],
        [(41, 1.0), (41, 2.0)],
    ]
    assert first.settings is None and second.settings is not None and second.settings.delay_ms == 20
    assert ours.started == [None] * 4  # looked at, searched for its knee, two rounds
    assert peer.started[-2:] == [second.settings] * 2


def test_the_first_round_draws_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    (standing,) = run_with(monkeypatch, [Formula("d", 50, 0.01)], FULL).standings
    rungs = Counter(point.rung for point in standing.points)
    assert rungs == Counter([50, 51] * 2 + [50 + offset for offset in CURVE])


def test_a_quick_run_searches_in_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer = Formula("d", 60, 0.01), Formula("p", 33, 0.02, object())
    comparison = run_with(monkeypatch, [ours, peer], QUICK)
    assert [[knee and knee.rung for knee in standing.knees] for standing in comparison.standings] == [[60], [33]]


def test_a_server_that_keeps_up_with_nothing_has_no_knee(monkeypatch: pytest.MonkeyPatch) -> None:
    (standing,) = run_with(monkeypatch, [Formula("d", -100, 0.01)], QUICK).standings
    assert standing.knees == [None]
    assert standing.points


def test_other_answers_in_fp32_are_an_error_and_in_int8_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"p": ["A DOG", "something else"]}
    with pytest.raises(RuntimeError, match="p gives 50% of d's answers"):
        run_with(monkeypatch, [Formula("d", 50, 0.01), Formula("p", 40, 0.02, object())], QUICK, other)
    formulas = [Formula("d", 50, 0.01, precision="int8"), Formula("p", 40, 0.02, object(), precision="int8")]
    comparison = run_with(monkeypatch, formulas, QUICK, other)
    assert [comparison.share_of_same(standing) for standing in comparison.standings] == [1.0, 0.5]
