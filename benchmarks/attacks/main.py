"""Attacks on a running server, the same ones on any checkout: `results/attacks.md` has the figures before and after a change.

    python -m benchmarks.attacks                                     # all of them, on this checkout, as "after"
    python -m benchmarks.attacks --source ../older --side before     # on another checkout, as "before"
    python -m benchmarks.attacks watch ids                           # two of them

What is not attacked keeps its figures of the last time. The attacker and those who suffer are this checkout's; of the
checkout under test only the server runs, and in `client` its client.
"""

import argparse
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.attacks import (
    answers,
    bundle,
    client,
    connections,
    counting,
    fair,
    ids,
    malformed,
    manifests,
    neighbours,
    reflection,
    rotation,
    scoring,
    suppressed,
    tokens,
    watch,
)
from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.harness.models import SHIPPED, endless_bundle
from benchmarks.harness.report import Section, environment, read, write

NAME = "attacks"
ROOT = Path(__file__).parents[2]
SIDES = ("before", "after")
MODULES = (watch, ids, scoring, answers, tokens, client, bundle, suppressed, reflection, manifests, malformed, counting, neighbours)
ATTACKS = tuple(module.ATTACK for module in (*MODULES, fair, rotation, connections))
NOTES = (
    "Each attack has a server of its own; a figure is of one run. Attacker, neighbours and server share the cores. The model is "
    "the shipped en-de with end-of-sequence ruled out. `docs/benchmarks.md` says what is done.",
)

Row = dict[str, str]


def merge(rows: Iterable[Row], side: str, attack: Attack, figures: Sequence[Figure]) -> list[Row]:
    """Return the rows with an attack's figures of one side, in the place of those it had; the other side's stay."""
    found = {row["figure"]: dict(row) for row in rows if row["attack"] == attack.title}
    for row in found.values():
        row[side] = "—"
    for figure in figures:
        row = found.setdefault(figure.name, {"attack": attack.title, "figure": figure.name, **dict.fromkeys(SIDES, "—")})
        row[side] = figure.value
    mine = [row for row in found.values() if any(row[each] != "—" for each in SIDES)]
    order = [each.title for each in ATTACKS]
    return sorted([*(row for row in rows if row["attack"] != attack.title), *mine], key=lambda row: order.index(row["attack"]))


def attack_with(attack: Attack, scene: Scene) -> list[Figure]:
    """Carry an attack out; what it could not tell any more is a figure too."""
    figures: list[Figure] = []
    began = time.monotonic()
    try:
        for figure in attack.run(scene):
            print(f"  {figure.name}: {figure.value}", flush=True)
            figures.append(figure)
    except Exception as error:
        traceback.print_exc()
        figures.append(Figure("ended with", type(error).__name__))
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    return figures


def main() -> None:
    """Attack and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"Of {', '.join(attack.name for attack in ATTACKS)}; all without one."
    )
    parser.add_argument("--source", type=Path, default=ROOT, help="Checkout whose server is attacked.")
    parser.add_argument("--side", choices=SIDES, default="after", help="Column of the table.")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {attack.name for attack in ATTACKS}:
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    scene = Scene(arguments.source.resolve(), endless_bundle(SHIPPED, arguments.cache).resolve())
    for attack in ATTACKS:
        if not arguments.names or attack.name in arguments.names:
            print(f"{attack.name}: {attack.title}", flush=True)
            _keep(arguments.side, scene.source, attack, attack_with(attack, scene))


def _keep(side: str, source: Path, attack: Attack, figures: Sequence[Figure]) -> None:
    """Write the table with an attack's new figures."""
    old = read(NAME) or Section({}, [])
    about = environment("grpcio", "onnxruntime")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=source, capture_output=True, text=True, check=False)
    sides = old.environment.get("sides", {}) | {side: {"commit": commit.stdout.strip(), "date": about["date"]}}
    told = [f"{name}: commit {sides[name]['commit']}, {sides[name]['date']}." for name in SIDES if name in sides]
    known = {each.title for each in ATTACKS}
    rows = [row for row in old.rows if row["attack"] in known]
    write(NAME, "Attacks", about | {"sides": sides}, merge(rows, side, attack, figures), [*NOTES, "", *told])


if __name__ == "__main__":
    main()
