"""The rules that are compared, what is said of them, and the measuring of a small model."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from benchmarks import autoscaling
from benchmarks.autoscaling import AT_ONCE, CHART, CHART_RULE, CPU, read_costs, rules, surges, trust, verdicts
from benchmarks.simulation.costs import Costs, Job
from benchmarks.simulation.engine_probe import EngineProbe
from benchmarks.simulation.server_probe import Check, Figures
from benchmarks.simulation.surge import Outcome
from dragoman.server.config import ServerConfig

SCALING = yaml.safe_load(CHART.read_text(encoding="utf-8"))["autoscaling"]


def outcome(share: float) -> Outcome:
    return Outcome(share, 0.5, 0.0, 3, 2.0, 10, 1.0)


def test_rules_have_the_charts_targets() -> None:
    found = {rule.name: rule for rule in rules(SCALING)}
    assert found[CPU].cpu_percent == SCALING["cpu"]["targetUtilization"] and found[CPU].queue_seconds is None
    assert (found["queue"].queue_seconds, found["queue"].num_waiting) == (0.5, 16)
    assert SCALING["slotsInUse"]["target"] is SCALING["cpu"]["enabled"] is None, "which leaves both to the chart"
    max_slots = ServerConfig.model_fields["max_slots"].default
    assert found["queue"].num_slots is None and found["queue and slots"].num_slots == max_slots * 3 // 8
    assert found[CHART_RULE].cpu_percent == SCALING["cpu"]["targetUtilization"]
    given = {rule.name: rule for rule in rules(SCALING | {"slotsInUse": {"enabled": True, "target": 7}})}
    assert given["queue and slots"].num_slots == given[CHART_RULE].num_slots == 7


def test_what_is_off_in_the_chart_is_no_part_of_its_rule() -> None:
    values = SCALING | {"cpu": {"enabled": False, "targetUtilization": 80}}
    assert {rule.name: rule for rule in rules(values)}[CHART_RULE].cpu_percent is None


def test_surges_are_equally_long() -> None:
    loads = surges(10.0, 60.0, 1200.0)
    assert {surge.end - surge.begin for surge in loads.values()} == {1200.0}
    assert loads[AT_ONCE].rate(60.0) == 50.0
    assert "in five minutes" not in surges(10.0, 60.0, 200.0)


def test_verdicts_ask_the_chart_to_hold_and_the_cpu_not_to() -> None:
    good = {(AT_ONCE, CPU): outcome(0.9), (AT_ONCE, CHART_RULE): outcome(0.96)}
    assert [kept for kept, _ in verdicts(good)] == [True, True]
    bad = {(AT_ONCE, CPU): outcome(0.96), (AT_ONCE, CHART_RULE): outcome(0.94)}
    assert [kept for kept, _ in verdicts(bad)] == [False, False]


def test_a_simulation_that_is_far_off_is_not_trusted() -> None:
    real = Figures(0.05, 0.1, 0.5)
    near, far = Check(10.0, real, Figures(0.05, 0.12, 0.5)), Check(10.0, real, Figures(0.05, 0.2, 0.5))
    assert trust([near, near, far], (100.0, 110.0))[0]
    assert not trust([near, far, far], (100.0, 110.0))[0]
    assert not trust([near], (100.0, 150.0))[0]


def test_costs_come_back_out_of_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(1, 8, [1, 8], [0.1, 0.2], 0.1, 0.0, 512, 16, [Job(3, 4)])
    path = tmp_path / "autoscaling.json"
    sections = {
        kind: {"environment": {"costs": msgspec.to_builtins(msgspec.structs.replace(costs, cores=cores))}, "rows": []}
        for kind, cores in (("avx2", 1), ("avx512_vnni", 2))
    }
    path.write_text(json.dumps({"title": "Autoscaling", "kinds": sections}), encoding="utf-8")
    for kind, cores in (("avx2", 1), ("avx512_vnni", 2), ("asimd", 1)):
        monkeypatch.setattr(autoscaling, "processor_kind", lambda kind=kind: kind)
        assert read_costs(path).cores == cores
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match="holds no costs"):
        read_costs(path)


def test_an_engines_steps_prefills_and_requests_are_measured(endless: tuple[Path, Path]) -> None:
    texts = ["a dog runs", "two men stand on a ladder", "one child plays"]
    costs = EngineProbe(endless[1], texts, num_beams=4, num_threads=1).measure()
    assert costs.num_requests == [1, 2, 4, 8, 16] and costs.max_running == 16
    assert all(seconds > 0 for seconds in costs.step_seconds)
    # The model never ends an answer, so every request takes as many steps as there may be tokens.
    assert len({job.num_steps for job in costs.jobs}) == 1 and costs.jobs[0].num_steps > 20
    assert len(costs.jobs) == 3 and costs.jobs[1].num_tokens > costs.jobs[0].num_tokens
