"""Swaps under load: what is done, and what came of it."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.served import descendants
from benchmarks.swaps.callers import Answer, Callers
from benchmarks.swaps.folder import Folder
from benchmarks.swaps.kills import KilledServer, is_running
from benchmarks.swaps.timeline import SERVED, Timeline, seconds_of

ENDED = "a version has ended"
QUIET = 0.1
"""Part of the time before the first swap, and again after the last, in which nothing changes."""
SWAP_SECONDS = 120.0
IDLE_SECONDS = 3.0


@dataclass(slots=True)
class Swapped:
    """What came of it.

    Attributes:
        answers: Of all requests.
        timeline: Of the versions.
        swaps: Begin and end of each, seconds since 1970: from the change of the folder until the old version's engine had ended.
        memory: MiB of the process tree, before the first swap and after the last.
        num_processes: Processes of the tree, before the first swap and after the last.
        code: Exit code of the server.
        problems: Swaps that were not done.
        memories: MiB of the process tree right before each swap.
    """

    answers: list[Answer]
    timeline: Timeline
    swaps: list[tuple[float, float]]
    memory: tuple[float, float] = (0.0, 0.0)
    num_processes: tuple[int, int] = (0, 0)
    code: int = 0
    problems: list[str] = field(default_factory=list)
    memories: list[float] = field(default_factory=list)

    @property
    def failed(self) -> list[Answer]:
        """Requests that were not answered."""
        return [answer for answer in self.answers if answer.error]

    @property
    def strange(self) -> list[Answer]:
        """Requests that were answered by a version that was the policy's at no moment between their beginning and their end."""
        answered = (answer for answer in self.answers if not answer.error)
        return [one for one in answered if not self.timeline.allows(one.model, one.version, one.began, one.ended)]

    def scores(self) -> dict[tuple[str, str, str], dict[str, set[float]]]:
        """Return which scores each version of a model has given in answers to the same question of the same kind."""
        found: dict[tuple[str, str, str], dict[str, set[float]]] = {}
        for one in self.answers:
            if not one.error:
                kind = one.kind if one.kind in ("beams", "score") else "greedy"
                found.setdefault((kind, one.model, one.text), {}).setdefault(one.version, set()).add(one.score)
        return found

    def num_in_publications(self) -> int:
        """Return how many requests were under way while a version of their model was being published."""
        changes = {model: self.timeline.changes(model) for model in self.timeline.periods}
        return sum(
            any(since <= one.ended and one.began <= published for since, published in changes[one.model]) for one in self.answers
        )

    def divided(self) -> dict[str, list[Answer]]:
        """Return the answered requests, those that began during a swap of any model apart from the others."""
        parts: dict[str, list[Answer]] = {"during swaps": [], "otherwise": []}
        for answer in self.answers:
            if not answer.error:
                is_during = any(began <= answer.began <= ended for began, ended in self.swaps)
                parts["during swaps" if is_during else "otherwise"].append(answer)
        return parts

    def rows(self) -> list[dict[str, Any]]:
        """Return the table: latencies by kind of call."""
        rows = []
        for part, answers in self.divided().items():
            for kind in (*sorted({answer.kind for answer in self.answers}), "all"):
                seconds = [one.ended - one.began for one in answers if kind in (one.kind, "all")]
                if seconds:
                    p50, p99 = np.percentile(seconds, [50, 99])
                    rows.append(
                        {
                            "when": part,
                            "calls": kind,
                            "requests": len(seconds),
                            "p50 ms": f"{1000 * p50:.0f}",
                            "p99 ms": f"{1000 * p99:.0f}",
                        }
                    )
        return rows

    def promises(self) -> list[tuple[bool, str]]:
        """Return what was promised, and whether it was kept."""
        by_error = Counter(answer.error for answer in self.failed)
        by_version = list(self.scores().values())
        num_undecided = sum(len(scores) > 1 for versions in by_version for scores in versions.values())
        num_told_apart = sum(len(versions) > 1 and not set.intersection(*versions.values()) for versions in by_version)
        before, after = self.memory
        return [
            (not self.failed, f"{len(self.failed)} of {len(self.answers)} requests failed {dict(by_error.most_common(5)) or ''}"),
            (not self.strange, f"{len(self.strange)} were answered by a version that was not the policy's at their arrival"),
            (
                not num_undecided,
                f"{num_undecided} of {len(by_version)} questions were answered by one version with scores of several bits; "
                f"by the bits of {num_told_apart} versions can be told apart",
            ),
            (not self.problems, f"{len(self.swaps)} swaps; not done: {self.problems or 'none'}"),
            (
                after <= before * 1.1 + 10,
                f"memory of all processes: {before:.0f} MiB before the first swap, {after:.0f} after the last",
            ),
            (
                self.num_processes[0] == self.num_processes[1],
                f"processes: {self.num_processes[0]} before, {self.num_processes[1]} after",
            ),
            (self.code == 0, f"exit code after SIGTERM: {self.code}"),
        ]


def swap_under_load(
    models: Mapping[str, tuple[Path, Path]], texts: Sequence[str], scratch: Path, flags: Sequence[str], how: "Plan"
) -> Swapped:
    """Change versions of models in turn while requests come; each model ends with the version that it began with.

    Args:
        models: Two bundles of each, versions of it.
        texts: Sources.
        scratch: An empty folder.
        flags: Of the server.
        how: How many of what.
    """
    folder = Folder(scratch / "models", models, how.probation_seconds)
    server = KilledServer(folder.path, flags)
    problems, swaps, memories = [], [], []
    try:
        with Callers(server.address, list(models), texts, how.rate, max_new_tokens=how.max_new_tokens, seed=how.seed) as callers:
            began = time.monotonic()
            time.sleep(how.seconds * QUIET)
            before = _memory(server)
            for number in range(how.num_swaps):
                time.sleep(max(0.0, began + how.seconds * (QUIET + (1 - 2 * QUIET) * number / how.num_swaps) - time.monotonic()))
                memories.append(_memory(server)[0])
                model = list(models)[number % len(models)]
                asked = time.time()
                folder.swap(model)
                if (ended := _wait_for_swap(server, model, folder.wanted()[model], asked)) is None:
                    problems.append(f"{model} at {asked:.0f}")
                swaps.append((asked, ended or time.time()))
            time.sleep(max(how.seconds * QUIET, began + how.seconds - time.monotonic()))
            after = _memory(server)
        time.sleep(IDLE_SECONDS)
        timeline = Timeline(server.all_events(), folder.asked)
        code = server.stop()
    finally:
        server.clear()
    memory, numbers = (before[0], after[0]), (before[1], after[1])
    return Swapped(callers.answers, timeline, swaps, memory, numbers, code, problems, memories)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many of what.

    Attributes:
        rate: Requests a second.
        seconds: In all.
        num_swaps: In that time, of all models in turn.
        probation_seconds: Of each version.
        max_new_tokens: Of an answer; 0 for the model's default.
        seed: Of the callers.
    """

    rate: float
    seconds: float
    num_swaps: int
    probation_seconds: float = 2.0
    max_new_tokens: int = 0
    seed: int = 0


def _wait_for_swap(server: KilledServer, model: str, content: str, asked: float) -> float | None:
    """Wait until a version answers and the one before has ended; return when that was, None if it does not come to pass."""
    until = time.monotonic() + SWAP_SECONDS
    while time.monotonic() < until:
        since = [event for event in server.all_events() if event.get("model") == model and seconds_of(event) >= asked]
        served = [event for event in since if event["event"] == SERVED]
        if served and set(served[-1]["versions"].values()) == {content} and not served[-1]["on_trial"]:
            if ended := [seconds_of(event) for event in since if event["event"] == ENDED]:
                return ended[-1]
        elif ended := [seconds_of(event) for event in since if event["event"] == ENDED and event["content"] != content]:
            return ended[-1]
        time.sleep(0.2)
    return None


def _memory(server: KilledServer) -> tuple[float, int]:
    """Return the MiB of all processes of a server, shared pages divided, and how many they are."""
    pids = [pid for pid in descendants(server.process.pid) if is_running(pid)]
    return sum(map(_proportional_kib, pids)) / 1024, len(pids)


def _proportional_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def counted(answers: Iterable[Answer]) -> dict[str, int]:
    """Return how many requests each version of each model has answered."""
    return dict(sorted(Counter(f"{one.model} {one.version}" for one in answers if not one.error).items()))
