"""Whether a deployment that scales by its queue, or by its processors, holds its objective while the load grows fivefold.

    python -m benchmarks.autoscaling --data data/multi30k [--costs FILE] [--quick]

What a replica's work costs is measured here, and a simulation of one replica is checked against a real server. Then a simulated
deployment of such replicas, with Kubernetes' HorizontalPodAutoscaler and the values of the chart, goes through surges.
The exit code is 1 if the chart's rule does not hold where it should, or the processors' does everywhere.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.harness import report
from benchmarks.harness.report import environment, figure_name, parse, write
from benchmarks.simulation.balancing import Balancer, Clients, Proxy
from benchmarks.simulation.cluster import Cluster, Rule
from benchmarks.simulation.controller import Behaviour, read_behaviour
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.engine_probe import EngineProbe
from benchmarks.simulation.plot import draw
from benchmarks.simulation.replica import capacity
from benchmarks.simulation.server_probe import Check, ServerProbe, on_cores, split_cores
from benchmarks.simulation.surge import Curve, Outcome, Surge, curve, judge
from dragoman.export.processor import processor_kind
from dragoman.model.corpus import read_lines

CHART = Path(__file__).parents[1] / "deploy/helm/dragoman/values.yaml"
# The chart's own target where its values have none, for the usual `max_slots`. The CPU it scales by, where there is no GPU.
USUAL_SLOTS = 24
GOAL = 0.95
FACTOR = 5.0
MAX_ERROR = 0.3
AT_ONCE, CPU, CHART_RULE = "at once", "CPU", "the chart's"
RISES = {AT_ONCE: 0.0, "in a minute": 60.0, "in five minutes": 300.0}
AGES = (300.0, 60.0)
"""Of connections, for clients that balance for themselves."""
NUM_CLIENTS = 20
NUM_TEXTS = 300


def rules(scaling: Mapping[str, Any]) -> list[Rule]:
    """Return the rules to compare, with the targets of the chart's values under `autoscaling`."""
    seconds, waiting = scaling["queueSeconds"], scaling["requestsWaiting"]
    slots, cpu = scaling["slotsInUse"], scaling["cpu"]
    num_slots = USUAL_SLOTS if slots["target"] is None else slots["target"]
    queue = {"queue_seconds": seconds["target"], "num_waiting": waiting["target"]}
    enabled = {
        "queue_seconds": seconds["target"] if seconds["enabled"] else None,
        "num_waiting": waiting["target"] if waiting["enabled"] else None,
        "num_slots": num_slots if slots["enabled"] else None,
        "cpu_percent": cpu["targetUtilization"] if cpu["enabled"] in (True, None) else None,
    }
    return [
        Rule(CPU, cpu_percent=cpu["targetUtilization"]),
        Rule("queue", **queue),
        Rule("queue and slots", **queue, num_slots=num_slots),
        Rule(CHART_RULE, **enabled),
    ]


def surges(base: float, calm_seconds: float, long_seconds: float) -> dict[str, Surge]:
    """Return the loads: each is at its height until `long_seconds` after it began to grow."""
    return {
        name: Surge(base, FACTOR, calm_seconds, rise, long_seconds - rise, long_seconds / 2)
        for name, rise in RISES.items()
        if rise < long_seconds
    }


def row(surge: str, rule: str, path: str, outcome: Outcome, objective: float) -> dict[str, Any]:
    """Return a row of the table."""
    return {
        f"{FACTOR:g}×": surge,
        "rule": rule,
        "calls go by": path,
        f"within {objective:g} s": f"{outcome.share_good:.1%}",
        "p95 s": f"{outcome.p95_seconds:.2f}",
        "refused": f"{outcome.share_refused:.1%}",
        "bad seconds": outcome.bad_seconds,
        "pods before": f"{outcome.pods_before:.1f}",
        "most pods": outcome.pods_most,
        "pod hours": f"{outcome.pod_hours:.2f}",
    }


def verdicts(outcomes: Mapping[tuple[str, str], Outcome]) -> list[tuple[bool, str]]:
    """Say of each promise whether it was kept; outcomes are by surge and rule."""
    found = [
        (outcome.share_good >= GOAL, f"{surge}: the chart's rule answered {outcome.share_good:.1%} in time (at least {GOAL:.0%})")
        for (surge, rule), outcome in outcomes.items()
        if rule == CHART_RULE
    ]
    share = outcomes[AT_ONCE, CPU].share_good
    return [*found, (share < GOAL, f"{AT_ONCE}: the CPU rule answered {share:.1%} in time, which is too little")]


def trust(checks: Sequence[Check], capacities: tuple[float, float]) -> tuple[bool, str]:
    """Say whether the simulated replica is like the real one: capacity, and latency at 95 % in the middle of the loads."""
    capacity_error = abs(capacities[1] / capacities[0] - 1)
    latency_error = statistics.median(abs(check.simulated.p95 / check.measured.p95 - 1) for check in checks)
    text = f"the simulation is off by {capacity_error:.0%} in capacity and by {latency_error:.0%} in p95 (at most {MAX_ERROR:.0%})"
    return max(capacity_error, latency_error) <= MAX_ERROR, text


def measure(arguments: argparse.Namespace) -> tuple[Costs, list[Check], tuple[float, float]]:
    """Measure the engine, then a real server beside its simulation."""
    lines = read_lines(arguments.data / "test_2016_flickr.en.gz")
    texts = list(dict.fromkeys(lines))[: 50 if arguments.quick else NUM_TEXTS]
    with on_cores(split_cores(arguments.cores)[0]):
        engine = EngineProbe(arguments.bundle, texts, arguments.num_beams, arguments.cores).measure()
    seconds = 3.0 if arguments.quick else arguments.seconds
    costs, checks, capacities = ServerProbe(arguments.bundle, texts, engine, seconds).measure()
    return costs, checks, capacities


def read_costs(path: Path) -> Costs:
    """Read the costs out of an earlier result, of this kind of processor if it has them, else of the first one it has.

    Raises:
        SystemExit: If there are none.
    """
    try:
        sections = parse(path).sections
        section = sections.get(processor_kind()) or next(iter(sections.values()))
        return msgspec.convert(section.environment["costs"], Costs)
    except (OSError, ValueError, KeyError, StopIteration, msgspec.ValidationError) as error:
        raise SystemExit(f"--costs: {path}: holds no costs: {error}") from error


def main() -> None:
    """Measure, simulate and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--cores", type=int, default=1, help="Of each replica.")
    parser.add_argument("--seconds", type=float, default=15.0, help="Of each load on the real server.")
    parser.add_argument("--costs", type=Path, help="An earlier result's JSON: nothing is measured.")
    parser.add_argument("--objective", type=float, default=1.0, help="Seconds that 95 %% of answers may take.")
    parser.add_argument("--start-seconds", type=float, default=30.0, help="From the decision for a pod until it is ready.")
    parser.add_argument("--base", type=float, default=0.4, help="Load before, as a part of the least pods' capacity.")
    parser.add_argument("--minutes", type=float, default=20.0, help="Of each surge.")
    parser.add_argument("--quick", action="store_true", help="Short surges; figures mean nothing.")
    arguments = parser.parse_args()
    about = environment("onnxruntime", "grpcio")
    checks: list[Check] = []
    capacities: tuple[float, float] | None = None
    if arguments.costs is None:
        costs, checks, capacities = measure(arguments)
    else:
        costs = read_costs(arguments.costs)
    scaling = yaml.safe_load(CHART.read_text(encoding="utf-8"))["autoscaling"]
    rows, outcomes, curves, loads = simulate(arguments, costs, scaling)
    promises = verdicts(outcomes) + ([trust(checks, capacities)] if capacities is not None else [])
    report.RESULTS.mkdir(exist_ok=True)
    draw(report.RESULTS / figure_name("autoscaling"), loads, curves, arguments.objective)
    about |= {
        "costs": msgspec.to_builtins(costs),
        "validation": [check.row() for check in checks],
        "capacity": capacities,
        "chart": scaling,
    }
    notes = [
        *_about_surges(arguments, costs, scaling),
        "",
        *_about_checks([check.row() for check in checks], capacities),
        "",
        f"![]({figure_name('autoscaling')})",
        "",
    ]
    notes += [f"- {'kept' if is_kept else 'MISSED'}: {text}" for is_kept, text in promises]
    write("autoscaling", "Autoscaling through a surge, simulated", about, rows, notes)
    sys.exit(not all(is_kept for is_kept, _ in promises))


def simulate(
    arguments: argparse.Namespace, costs: Costs, scaling: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], Outcome], dict[tuple[str, str], Curve], dict[str, Surge]]:
    """Go through every surge with every rule, and through the sudden one with clients that balance for themselves too."""
    behaviour: Behaviour = read_behaviour(scaling)
    base = arguments.base * behaviour.least * capacity(costs)
    loads = surges(base, 300.0 if arguments.quick else 900.0, 420.0 if arguments.quick else arguments.minutes * 60)
    rows: list[dict[str, Any]] = []
    outcomes: dict[tuple[str, str], Outcome] = {}
    curves: dict[tuple[str, str], Curve] = {}

    def run(name: str, surge: Surge, rule: Rule, path: str, balancer: Balancer) -> tuple[Outcome, Curve]:
        cluster = Cluster(costs, behaviour, rule, arguments.start_seconds, balancer, random.Random(name))
        history = cluster.run(surge.rate, surge.seconds)
        outcome = judge(surge, history, arguments.objective)
        rows.append(row(name, rule.name, path, outcome, arguments.objective))
        return outcome, curve(history)

    for name, surge in loads.items():
        for rule in rules(scaling):
            outcomes[name, rule.name], curves[name, rule.name] = run(name, surge, rule, "proxy", Proxy())
    (chosen,) = (rule for rule in rules(scaling) if rule.name == CHART_RULE)
    for age in AGES:
        clients = Clients(NUM_CLIENTS, age, random.Random(0))
        run(AT_ONCE, loads[AT_ONCE], chosen, f"clients, connections end after {age:g} s", clients)
    return rows, outcomes, curves, loads


def _about_surges(arguments: argparse.Namespace, costs: Costs, scaling: Mapping[str, Any]) -> list[str]:
    least, most, target = scaling["minReplicas"], scaling["maxReplicas"], scaling["cpu"]["targetUtilization"]
    return [
        f"Replicas of {costs.cores:g} core, beam {costs.num_rows}, {capacity(costs):.1f} requests/s each, {least} to {most} "
        f"of them. The load before is {arguments.base:.0%} of what {least} can do, grows to {FACTOR:g} times that, and is "
        f"back after {arguments.minutes:g} minutes. A pod takes requests {arguments.start_seconds:g} s after the controller "
        "asked for it; metrics are read every 15 s, the controller acts every 15 s, with the behaviour and limits of the "
        "chart under every rule. Shares and p95 are of the requests due while the load was up, a refusal counted as never "
        f"answered; in a bad second fewer than {GOAL:.0%} of those due in it were answered in time. Pod hours run from the "
        "beginning of the surge until the load has been back for half as long.",
        "",
        "Why CPU does not do: a replica that decodes uses its core at any load, with fewer rows in a step when there is "
        "less to do. So the processor is nearly full before the replica is, and from there on it cannot say how much "
        f"is missing: 100 % of a target of {target} % asks for {100 / target:.2f} times the pods, however long the queue is, "
        "and again only once those are ready and measured. What it has going for it is slack: it keeps more pods than are "
        "needed. A queue alone says nothing while there is none: pods are given back until it returns. Slots in use say how "
        "full a replica is in between.",
    ]


def _about_checks(checks: Sequence[Mapping[str, Any]], capacities: tuple[float, float] | None) -> list[str]:
    if not checks or capacities is None:
        return ["Costs are an earlier result's; nothing was measured."]
    columns = list(checks[0])
    measured, simulated = capacities
    return [
        "The simulation of one replica beside a real server, same arrivals and texts; what the front end adds was "
        "calibrated with a lighter load than these and, its processor time, with callers that wait. Those got "
        f"{measured:.1f} requests/s, simulated with full slots {simulated:.1f}.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(str(check[column]) for column in columns) + " |" for check in checks),
    ]


if __name__ == "__main__":
    main()
