"""Plans of engines: measured once for a size of models, kept, and given up where they cannot be measured."""

import asyncio
import contextlib
import math
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog

from dragoman.export.bundle import Bundle
from dragoman.server import system
from dragoman.server.runtime import plan as planning
from dragoman.server.runtime.plan import Plan, Sizes, known_plan, measured_plan
from dragoman.server.runtime.runner import Candidates
from dragoman.server.runtime.weights_cache import Cache, CacheError
from tests.export.conftest import Export
from tests.system.harness.server import wait_until


def measured(bundle: Bundle, folder: Path, num_cores: int = 2) -> tuple[Plan | None, list[Any]]:
    with structlog.testing.capture_logs() as lines:
        return asyncio.run(measured_plan(bundle, str(folder), Sizes(num_cores, 2, 8))), lines


@pytest.mark.parametrize(("name", "precision"), [("tiny", "int8"), ("llama", "fp32"), ("one token", "fp32")])
def test_plan_is_measured_once_for_every_model_of_its_size(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    bundle = export(name, precision)
    plan, (line,) = measured(bundle, tmp_path)
    assert plan is not None and (plan.num_replicas, plan.num_threads) in ((1, 2), (2, 1))
    assert plan.rates.keys() == {"2 x 1", "1 x 2"} and all(rate > 0 for rate in plan.rates.values())
    assert plan.wide.num_threads in ((0, 2) if plan.num_threads == 1 else (0,))
    assert (line["event"], line["engines_and_threads"]) == ("engines measured", f"{plan.num_replicas} x {plan.num_threads}")
    monkeypatch.setattr(system.sys, "executable", "/bin/false")
    assert measured(bundle, tmp_path) == (plan, [])
    assert known_plan(msgspec.structs.replace(bundle.manifest, version="another"), str(tmp_path), Sizes(2, 2, 8)) == plan
    assert known_plan(bundle.manifest, str(tmp_path), Sizes(3, 2, 8)) is None, "another number of cores"
    none, (line,) = measured(bundle, tmp_path, num_cores=3)
    assert none is None and line["log_level"] == "warning"


def test_reason_is_logged_where_nothing_can_be_measured(export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    none, (line,) = measured(export("tiny", "int8"), tmp_path / "file")
    assert none is None and "weights cannot be shared" in line["reason"] and line["log_level"] == "warning"
    monkeypatch.setattr(system.sys, "executable", "/missing")
    none, (line,) = measured(export("tiny", "int8"), tmp_path)
    assert none is None and "/missing" in line["reason"]


def test_one_that_takes_too_long_is_not_tried_again(export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = export("tiny", "int8")
    arguments = str(bundle.directory), bundle.digest, str(tmp_path), *map(str, Sizes(2, 2, 8))
    monkeypatch.setattr(planning, "end_with_parent", lambda: None)
    monkeypatch.setattr(planning, "MAX_SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    planning.main()
    none, (line,) = measured(bundle, tmp_path)
    assert none is None and line["reason"] == "it takes more than 0 s"


@pytest.mark.parametrize("content", ["{}", '{"type": "Plan", "num_replicas": 0, "num_threads": 1}'])
def test_unreadable_plan_is_named(export: Export, tmp_path: Path, content: str) -> None:
    bundle = export("tiny", "int8")
    name = planning._name(bundle.manifest, Sizes(2, 2, 8))
    Cache(tmp_path).find_or_make(name, lambda entry, _: void((entry / "plan.json").write_text(content)), 1)
    none, (line,) = measured(bundle, tmp_path)
    assert none is None and f"{name}/plan.json" in line["reason"] and "remove it" in line["reason"]


def void(_: object) -> None: ...


PARENT = """
import asyncio, sys
from pathlib import Path
from dragoman.export.bundle import Bundle
from dragoman.server.runtime.plan import Sizes, measured_plan
asyncio.run(measured_plan(Bundle.open(Path(sys.argv[1])), sys.argv[2], Sizes(2, 2, 8)))
"""


def processes(module: str, folder: Path) -> list[int]:
    """Return the processes that run a module for a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes()
            if module.encode() in line and bytes(folder) in line:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_one_whose_parent_ends_leaves_no_process(export: Export, tmp_path: Path, how: signal.Signals) -> None:
    """Neither the one that measures nor the one that writes the weights for it."""
    bundle = export("tiny", "int8")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(bundle.directory), str(tmp_path)], stderr=subprocess.DEVNULL)
    wait_until(lambda: processes("runtime.weights", tmp_path), "weights are being written")
    parent.send_signal(how)
    assert parent.wait(30) != 0
    wait_until(lambda: not processes("server.runtime", tmp_path), "both have ended")


class Runner:
    max_rows = 4

    def __init__(self, value: float) -> None:
        self.value = value

    def prefill(self, sources: object, rows: object) -> None: ...

    def step(self, tokens: Any, positions: Any, num_candidates: int) -> Candidates:
        return Candidates(np.zeros((len(tokens), 1), np.int64), np.full((len(tokens), 1), self.value, np.float32))


def test_threads_that_change_bits_are_refused() -> None:
    manifest: Any = SimpleNamespace(
        eos_id=1, has_prompts=False, max_source_tokens=9, max_target_tokens=9, decoder_start_id=0, num_choices=9
    )
    narrow, same, other = (Runner(value) for value in (1.0, 1.0, 1.0 + 2**-20))
    assert planning._narrow_seconds(narrow, same, manifest, math.inf).keys() <= {1, 2, 4}
    with pytest.raises(CacheError, match="other bits"):
        planning._narrow_seconds(narrow, other, manifest, math.inf)
