"""The benchmark `engines` on a small model: real servers, real processes, every part from end to end."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.engines import captions as engine_captions
from benchmarks.engines import requests as engine_requests
from benchmarks.engines import throughput as engine_throughput
from benchmarks.engines.requests import Case, check_lengths, check_sameness, uniform
from benchmarks.engines.sides import Run
from benchmarks.engines.stage import ENGINE, SERVED, Stage, worker_name
from benchmarks.harness import contest, report
from dragoman.model.checkpoint import Checkpoint

ABOUT = {"date": "today", "cores": 1, "processor": "a processor", "python": "3", "versions": {}, "rounds": 2, "threads": 1}


@pytest.fixture(scope="module")
def stage(endless: tuple[Path, Path]) -> Iterator[Stage]:
    checkpoint, bundle = endless
    with Stage(Checkpoint.load(checkpoint), "fp32", bundle.parent, 1, 16) as stage:
        yield stage


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
    served, decoded = stage.serve(workload, 4), stage.decode(workload, 2)
    assert served.answers == decoded.answers
    assert {len(answer) for answer in served.answers} == {engine_requests.NUM_NEW_TOKENS}
    assert set(served.cores) == {"sender", "front end", "engine"}
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
    written = json.loads((results / "engines.json").read_text())
    assert [row["requests"] for row in written["rows"]] == [1, 4]
    assert all(float(row["engine"].replace(",", "")) > 0 for row in written["rows"])
    sides = {run["side"] for run in written["environment"]["runs"]}
    assert {SERVED, ENGINE, *map(worker_name, stage.workers)} <= sides
    assert all(len(run["tokens a second"]) == 2 for run in written["environment"]["runs"])
    assert "| fp32 | greedy | 16 | 4 |" in (results / "engines.md").read_text()


@pytest.mark.e2e
def test_throughput_is_measured_in_the_best_setting(stage: Stage, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_throughput, "CONCURRENCY", (4, 8))
    measured = engine_throughput.Results()
    measured.measure(stage, Case("beam 2", 2, 5), (4, 8), num_rounds=1, seconds=0.01)
    measured.write(ABOUT)
    (row,) = json.loads((results / "engines_throughput.json").read_text())["rows"]
    assert float(row["Dragoman gRPC, 8"].replace(",", "")) > 0
    if stage.workers:
        assert row["its setting"] in {
            f"{stage.worker_threads(count)}, batches of {size}" for count in stage.workers for size in (2, 4)
        }


@pytest.mark.e2e
def test_captions_have_bleu_beside_their_speed(stage: Stage, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[tuple[list[str], list[str]]] = []

    def score(hypotheses: list[str], references: list[str]) -> SimpleNamespace:
        scored.append((hypotheses, references))
        return SimpleNamespace(bleu=12.346)

    monkeypatch.setattr(engine_captions, "MAX_NEW_TOKENS", 12)
    monkeypatch.setattr(engine_captions, "score", score)
    texts, references = ["a dog runs", "two men stand on a ladder"], ["ein Hund", "zwei Menschen"]
    measured = engine_captions.Results(texts, references)
    measured.measure(stage, "greedy", 1, (2, 4), num_rounds=1)
    measured.write(ABOUT)
    (row,) = json.loads((results / "engines_captions.json").read_text())["rows"]
    assert row["BLEU, Dragoman"] == "12.35"
    assert float(row["Dragoman gRPC"]) > 0
    answers = stage.serve(engine_requests.Workload(texts, [], 1, 12), 2).answers
    decoded = [stage.checkpoint.tokenizers.target.decode(ids) for ids in answers]
    assert all(pair == (decoded, references) for pair in scored) and scored


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
