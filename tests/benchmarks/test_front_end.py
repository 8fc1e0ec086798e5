import json
import sys
from pathlib import Path

from benchmarks.front_end import Turn, table
from benchmarks.harness.sampled import OTHERS, Sampler


def test_parts_have_a_row_each_the_largest_first_and_all_of_it_is_last() -> None:
    turns = {"before": Turn(30.0, {"log": 10.04, "calls": 20.0}, 99.6), "now": Turn(25.0, {"calls": 25.0}, 120.0)}
    assert table(turns) == [
        {"part": "calls", "before": 20.0, "now": 25.0},
        {"part": "log", "before": 10.0, "now": 0.0},
        {"part": "all", "before": 30.0, "now": 25.0},
        {"part": "requests/s", "before": 100, "now": 120},
    ]


def test_a_stack_counts_for_the_innermost_file_that_is_known(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "counts")
    name = "/somewhere/model/text/byte_level.py"
    code = compile("def encode(act):\n    act()", name, "exec")
    known: dict[str, object] = {}
    exec(code, known)
    known["encode"](lambda: sampler.sample(0, sys._getframe()))  # type: ignore[operator]
    sampler.sample(0, sys._getframe())
    sampler.write(0, None)
    assert json.loads((tmp_path / "counts").read_text())["parts"] == {"tokeniser": 1, OTHERS: 1}
    sampler.write(0, None)
    assert json.loads((tmp_path / "counts").read_text())["parts"] == {}
