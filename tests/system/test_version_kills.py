"""Processes of all kinds are killed in the middle of swaps; `python -m benchmarks.swaps --kills` does so much longer."""

import sys
from pathlib import Path

import pytest

from benchmarks.swaps.kills import kill_at_random

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of processes")]


@pytest.mark.parametrize(("flags", "num_kills"), [((), 3), (("--front-ends=2",), 3)], ids=["one", "two front ends"])
def test_whatever_is_killed_in_a_swap_leaves_nothing_half_done(
    version_bundles: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], num_kills: int
) -> None:
    monkeypatch.setattr("benchmarks.swaps.kills.SWAP_SECONDS", 1.5)
    models = {"alpha": (version_bundles / "one", version_bundles / "two")}
    kills = kill_at_random(models, num_kills, ("--num-threads=1", *flags), seed=len(flags))
    assert len(kills) == num_kills
    assert not [(kill.role, kill.problems) for kill in kills if kill.problems]
