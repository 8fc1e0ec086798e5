"""The benchmark `engines` on a small model: real servers, real processes, every part from end to end."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engines import captions as engine_captions
from benchmarks.engines import requests as engine_requests
from benchmarks.engines import throughput as engine_throughput
from benchmarks.engines.requests import Case, check_lengths, check_sameness
from benchmarks.engines.sides import Run
from benchmarks.engines.stage import BEFORE, ENGINE, SERVED, Plan, Stage, worker_name
from benchmarks.engines.sweep import best
from benchmarks.engines.table import Table, uniform
from benchmarks.harness import contest, report
from benchmarks.harness.setting import ROOT, Setting, has_setting, settings
from dragoman.model.checkpoint import Checkpoint

MACHINE = {"date": "today", "cores": 1, "processor": "a processor", "python": "3", "versions": {}}
ABOUT = MACHINE | {"rounds": 2, "threads": 1, "commit": "abc"}
SETTING = Setting(1, 1, 16)


@pytest.fixture(scope="module")
def stage(endless: tuple[Path, Path]) -> Iterator[Stage]:
    checkpoint, bundle = endless
    plan = Plan(bundle.parent, 1, [SETTING], has_transformers=True)
    with Stage(Checkpoint.load(checkpoint), "fp32", plan) as stage:
        yield stage


def content(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())["kinds"]["avx2"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "processor_kind", lambda: "avx2")
    monkeypatch.setattr(contest, "PAUSE_SECONDS", 0.0)
    return tmp_path


@pytest.mark.e2e
@pytest.mark.parametrize(("search", "num_beams"), [("greedy", 1), ("beam 2", 2)])
def test_server_and_engine_answer_the_same(stage: Stage, search: str, num_beams: int) -> None:
    workload = engine_requests.workload(stage, Case(search, num_beams, 5)).first(9)
    served, bulk = stage.serve(SETTING, workload, 4), stage.serve(SETTING, workload, 4, is_bulk=True)
    decoded = stage.decode(SETTING, workload, 2)
    assert served.answers == bulk.answers == decoded.answers
    assert {len(answer) for answer in served.answers} == {engine_requests.NUM_NEW_TOKENS}
    assert set(served.cores) == set(bulk.cores) == {"sender", "front end", "engine"}
    assert stage.decode(Setting(2, 1, 8), workload).answers == decoded.answers
    for num_workers in stage.workers:
        assert stage.ctranslate2(workload, num_workers, 4).answers == decoded.answers
    if stage.has_transformers:
        assert stage.transformers(workload, 4).answers == decoded.answers


@pytest.mark.e2e
def test_requests_are_measured_on_every_side(stage: Stage, results: Path) -> None:
    measured = engine_requests.Results()
    for concurrency in (1, 4):
        measured.measure(stage, Case("greedy", 1, 16), concurrency, num_rounds=2, seconds=0.01)
    measured.write(ABOUT)
    written = content(results, "engines")
    assert [row["requests"] for row in written["rows"]] == [1, 4]
    assert all(row["measured"].endswith(", rounds: 2") for row in written["rows"])
    assert all(float(row["engine"].replace(",", "")) > 0 for row in written["rows"])
    sides = {run["side"] for run in written["environment"]["runs"]}
    assert {f"{SERVED} 1 × 1", ENGINE, *map(worker_name, stage.workers)} <= sides
    assert all(len(run["tokens a second"]) == 2 for run in written["environment"]["runs"])
    assert "| fp32 | greedy | 16 | 4 |" in (results / "engines.md").read_text()


@pytest.mark.e2e
def test_throughput_is_measured_in_the_best_setting(stage: Stage, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_throughput, "CONCURRENCY", (4, 8))
    measured = engine_throughput.Results([SETTING, Setting(2, 1, 8)])
    measured.measure(stage, Case("beam 2", 2, 5), (4, 8), num_rounds=1, seconds=0.01)
    measured.write(ABOUT)
    (row,) = content(results, "engines_throughput")["rows"]
    assert all(float(row[side].replace(",", "")) > 0 for side in ("engine", "gRPC", "gRPC in bulk"))
    assert row["gRPC: setting"] in {f"1 × 1, 16 slots, {count} at a time" for count in (4, 8)}
    if stage.workers:
        assert row["CTranslate2: setting"] in {f"1 × 1, {size} examples" for size in (2, 4)}


@pytest.mark.e2e
def test_captions_have_bleu_beside_their_speed(stage: Stage, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[tuple[list[str], list[str]]] = []

    def score(hypotheses: list[str], references: list[str]) -> SimpleNamespace:
        scored.append((hypotheses, references))
        return SimpleNamespace(bleu=12.346)

    monkeypatch.setattr(engine_captions, "MAX_NEW_TOKENS", 12)
    monkeypatch.setattr(engine_captions, "score", score)
    texts, references = ["a dog runs", "two men stand on a ladder"], ["ein Hund", "zwei Menschen"]
    measured = engine_captions.Results(texts, references, [SETTING])
    measured.measure(stage, "greedy", 1, (2, 4), num_rounds=1, seconds=1.0)
    measured.write(ABOUT)
    (row,) = content(results, "engines_captions")["rows"]
    assert row["BLEU, Dragoman"] == "12.35"
    assert all(float(row[side].replace(",", "")) > 0 for side in ("engine", "gRPC", "gRPC in bulk"))
    answers = stage.serve(SETTING, engine_requests.Workload(texts, [], 1, 12), 2).answers
    decoded = [stage.checkpoint.tokenizers.target.decode(ids) for ids in answers]
    assert all(pair == (decoded, references) for pair in scored) and scored


@pytest.mark.e2e
def test_an_older_checkout_takes_part_with_a_bundle_of_its_own(endless: tuple[Path, Path], tmp_path: Path, results: Path) -> None:
    plan = Plan(tmp_path / "cache", 1, [SETTING], source=ROOT, source_slots=4)
    with Stage(Checkpoint.load(endless[0]), "fp32", plan) as stage:
        measured = engine_requests.Results()
        measured.measure(stage, Case("greedy", 1, 5), 2, num_rounds=1, seconds=0.01)
    measured.write(ABOUT | {"before": "0ld"})
    (row,) = content(results, "engines")["rows"]
    assert float(row["before, gRPC"].replace(",", "")) > 0
    assert BEFORE in {run["side"] for run in content(results, "engines")["environment"]["runs"]}
    assert "commit 0ld" in (results / "engines.md").read_text()
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir() and "fp32-" in path.name]) >= 1


def test_cases_that_are_not_measured_again_keep_their_rows_and_runs(results: Path) -> None:
    run = Run(1.0, [[5, 6]], {})
    for date, cases in (("2026-01-01", {"a": 1, "b": 2}), ("2026-01-02", {"b": 3})):
        table = Table()
        for name, figure in cases.items():
            table.add({"case": name}, {"figure": figure}, {"ours": [run] * figure})
        table.write("speed", "Speed", ABOUT | {"date": date}, ("case",), [])
    section = content(results, "speed")
    assert section["rows"] == [
        {"case": "a", "figure": 1, "measured": "2026-01-01, abc, rounds: 1"},
        {"case": "b", "figure": 3, "measured": "2026-01-02, abc, rounds: 3"},
    ]
    assert [(each["case"], len(each["seconds"])) for each in section["environment"]["runs"]] == [("a", 1), ("b", 3)]


def test_settings_share_the_threads_out() -> None:
    assert settings(4, (64, 128), (1, 2)) == [Setting(1, 4, 64), Setting(1, 4, 128), Setting(2, 2, 64), Setting(2, 2, 128)]
    assert [each.front_ends for each in settings(1, (64,), (1,), (1, 2))] == [1, 2]
    assert str(Setting(2, 1, 64, 2)) == "2 × 1, 64 slots, 2 front ends" and Setting(2, 1, 64).total_slots == 128
    with pytest.raises(ValueError, match="3 replicas need as many threads"):
        settings(2, (64,), (3,))


def test_a_server_is_told_only_what_it_has_settings_for(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "config.py").write_text("class ServerConfig:\n    max_slots: Count = Field(64)\n    # replicas: none\n")
    assert has_setting("max_slots", tmp_path) and not has_setting("replicas", tmp_path)
    assert Setting(1, 2, 64).flags(tmp_path) == ["--num-threads=2", "--max-slots=64"]
    (tmp_path / "server" / "config.py").write_text("    replicas: Count = 1\n    front_ends: Count = 1\n")
    assert Setting(2, 1, 64, 3).flags(tmp_path)[2:] == ["--replicas=2", "--front-ends=3"]


def test_work_that_is_dealt_out_comes_back_in_its_order() -> None:
    work = engine_requests.Workload(list("abcde"), [[i] for i in range(5)], 1, 9)
    pieces = work.dealt(2)
    assert [piece.texts for piece in pieces] == [["a", "c", "e"], ["b", "d"]]
    runs = [Run(1.0, piece.sources, {}) for piece in pieces]
    assert Run.together(runs, 2.0).answers == work.sources


def test_the_best_setting_is_taken_and_every_try_told() -> None:
    work = engine_requests.Workload(list("abcd"), [[i] for i in range(4)], 1, 9)
    sizes: list[int] = []

    def way(seconds: float, work: engine_requests.Workload) -> Run:
        sizes.append(len(work.texts))
        return Run(seconds, work.sources, {})

    found = best({"slow": partial(way, 4.0), "fast": partial(way, 1.0), "middle": partial(way, 2.0)}, work, warm_up=2)
    assert found.label == "fast" and found.work(work).seconds == 1.0
    assert [each["tokens a second"] for each in found.tries] == [1, 4, 2]
    assert sizes[:9] == [2, 4, 2, 4, 2, 4, 4, 4, 4]


def test_a_try_that_was_disturbed_does_not_decide() -> None:
    work = engine_requests.Workload(list("abcd"), [[i] for i in range(4)], 1, 9)
    seconds = {"disturbed": iter([1.0, 9.0, 1.0]), "steady": iter([2.0, 2.0, 2.0])}

    def way(label: str, work: engine_requests.Workload) -> Run:
        return Run(next(seconds[label]), work.sources, {})

    assert best({label: partial(way, label) for label in seconds}, work, warm_up=2).label == "disturbed"


def test_sides_that_do_less_are_found_out() -> None:
    full, short = Run(1, [[5] * engine_requests.NUM_NEW_TOKENS], {}), Run(1, [[5]], {})
    check_lengths({"a": [full], "b": [full]})
    with pytest.raises(RuntimeError, match="b: not every answer has 32 tokens"):
        check_lengths({"a": [full], "b": [full, short]})
    check_sameness(full, full)
    with pytest.raises(RuntimeError, match="not the engine's"):
        check_sameness(full, short)


def test_every_row_gets_all_columns_in_one_order() -> None:
    rows = uniform([{"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}])
    assert [list(row) for row in rows] == [["a", "b", "c"], ["a", "b", "c"]]
    assert rows[0]["b"] == ""
