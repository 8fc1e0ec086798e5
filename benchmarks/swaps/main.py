"""Versions of two models change under load: nothing may be lost, and no answer come from a version that was not to answer.

    python -m benchmarks.swaps --data data/multi30k [--rate 200] [--minutes 5] [--swaps 20] [--front-ends 2 --replicas 2]
    python -m benchmarks.swaps --kills 50 [--seed 0]

Each of two checkpoints is exported twice, in single precision and in 8 bits; these are two versions of a model. One server; callers
that never try again send unary calls, streams, batches, beams and pairs to be scored at random times, while the versions of the
models go forwards and back in turn. With `--kills` processes of the server are killed at random moments of swaps instead: the
server itself, front ends and engines. The exit code is 1 if a promise was not kept.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.engines.table import commit
from benchmarks.harness.report import environment, write
from benchmarks.swaps.folder import MAX_LATENCY_FACTOR
from benchmarks.swaps.kills import ROOT, Kill, kill_at_random
from benchmarks.swaps.swapped import Plan, Swapped, counted, swap_under_load
from dragoman.model.corpus import read_lines

PRECISIONS = ("fp32", "int8")


def export(checkpoint: Path, folder: Path) -> tuple[Path, Path]:
    """Return two bundles of a checkpoint, versions of the model."""
    bundles = []
    for precision in PRECISIONS:
        bundle = folder / f"{checkpoint.name}-{precision}"
        command = [sys.executable, "-m", "dragoman", "export", str(checkpoint), str(bundle), "--precision", precision]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        bundles.append(bundle)
    return bundles[0], bundles[1]


def main() -> None:
    """Swap, or kill, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swaps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument(
        "--checkpoints", type=Path, nargs="+", default=[ROOT / "model/pretrained" / name for name in ("en-de", "en-fr")]
    )
    parser.add_argument("--rate", type=float, default=200.0, help="Requests a second.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--swaps", type=int, default=20, help="Of all models together, forwards and back in turn.")
    parser.add_argument("--probation", type=float, default=2.0, help="Seconds that a version is on probation.")
    parser.add_argument("--threads", type=int, default=1, help="Of each engine.")
    parser.add_argument("--replicas", type=int, default=1, help="Engines of each version.")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0, help="Kill so many processes instead of sending requests.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    flags = [f"--num-threads={arguments.threads}", f"--replicas={arguments.replicas}", f"--front-ends={arguments.front_ends}"]
    about = environment("onnxruntime", "grpcio") | {"flags": flags, "seed": arguments.seed, "commit": commit()}
    suffix = "" if (arguments.replicas, arguments.front_ends) == (1, 1) else f"-{arguments.replicas}x{arguments.front_ends}"
    setting = f"{arguments.replicas} x {arguments.threads} threads a version, {arguments.front_ends} front end(s)"
    with tempfile.TemporaryDirectory() as scratch:
        models = {checkpoint.name: export(checkpoint, Path(scratch)) for checkpoint in arguments.checkpoints}
        if arguments.kills:
            kills = kill_at_random(models, arguments.kills, flags, arguments.seed)
        else:
            texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
            plan = Plan(arguments.rate, arguments.minutes * 60, arguments.swaps, arguments.probation, seed=arguments.seed)
            swapped = swap_under_load(models, texts, Path(scratch), flags, plan)
    if arguments.kills:
        sys.exit(_write_kills(f"swaps-kills{suffix}", about, kills, setting))
    sys.exit(_write_swaps(f"swaps{suffix}", about, swapped, plan, setting))


def _write_kills(name: str, about: dict[str, object], kills: list[Kill], setting: str) -> bool:
    """Write what came of the kills; return whether something was not as it has to be."""
    roles = Counter(kill.role for kill in kills)
    bad = [kill for kill in kills if kill.problems]
    rows = [
        {"killed": role, "times": count, "not as it has to be": sum(kill.role == role for kill in bad)}
        for role, count in sorted(roles.items())
    ]
    notes = [
        f"Two models, {setting}; each kill at a random moment of a swap. After each, all models have to be answered by the "
        "versions that their folders hold, with as many engines as they need, and of a server that was killed nothing may be left.",
        "",
        *(f"- MISSED: {kill.role} after {kill.seconds:.1f} s: {'; '.join(kill.problems)}" for kill in bad),
    ]
    write(name, "Kills in the middle of swaps", about, rows, notes)
    return bool(bad)


def _write_swaps(name: str, about: dict[str, object], swapped: Swapped, plan: Plan, setting: str) -> bool:
    """Write what came of the swaps; return whether a promise was not kept."""
    promises = swapped.promises()
    lengths = [ended - began for began, ended in swapped.swaps]
    about |= {"rate": plan.rate, "seconds": plan.seconds, "versions": about["versions"], "answers": counted(swapped.answers)}
    about["swaps"] = [round(length, 2) for length in lengths]
    about["memory before each swap, MiB"] = [round(memory) for memory in swapped.memories]
    notes = [
        f"Two models, {setting}, {plan.rate:g} requests/s for {plan.seconds:g} s with {len(swapped.swaps)} swaps, probation "
        f"{plan.probation_seconds:g} s, in which answers may take {MAX_LATENCY_FACTOR} times as long; the senders on the same "
        "cores, and they never try again. A swap lasts from the change of "
        f"the folder until the engine of the version before has ended: {min(lengths):.1f} to {max(lengths):.1f} s. "
        f"{swapped.num_in_publications()} requests were under way while a version of their model was being published: either is "
        "right for those.",
        "",
        *(f"- {'kept' if is_kept else 'MISSED'}: {text}" for is_kept, text in promises),
    ]
    write(name, "Swaps under load", about, swapped.rows(), notes)
    return not all(is_kept for is_kept, _ in promises)
