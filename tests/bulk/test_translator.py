"""`dragoman.bulk.Translator`: batches of every kind, errors of rows, and the answers of PyTorch."""

import gc
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from dragoman import Term
from dragoman.bulk import Columns, Translator
from dragoman.bulk.engine import LocalEngine
from dragoman.export.bundle import Bundle
from dragoman.model.errors import InputError
from dragoman.server.engine.engine import Engine, EngineIsBroken
from dragoman.server.models.memory import Room, slot_bytes
from dragoman.server.runtime.onnx import OnnxRunner
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT
from tests.bulk.conftest import Parallel

KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mapping": dict,
    "arrays": lambda columns: {name: pd.Series(values).to_numpy() for name, values in columns.items()},
    "table": pa.table,
    "record batch": lambda columns: pa.RecordBatch.from_pydict(columns),
    "data frame": pd.DataFrame,
}


@pytest.fixture(scope="module")
def translator(bundle: Path) -> Iterator[Translator]:
    translator = Translator(bundle, num_threads=1, max_slots=4)
    yield translator
    translator.close()


def column(batch: Any, name: str) -> list[Any]:
    values = batch[name]
    return [None if isinstance(value, float) else value for value in getattr(values, "to_pylist", lambda: list(values))()]


def test_log_probabilities_are_computed_for_columns_of_scores_alone(
    bundle: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, step = set[int](), OnnxRunner.step

    def noting(self: OnnxRunner, tokens: Any, positions: Any, num_candidates: int) -> Any:
        asked.add(num_candidates)
        return step(self, tokens, positions, num_candidates)

    monkeypatch.setattr(OnnxRunner, "step", noting)
    for score, options, expected in (("", {}, {0}), ("score", {}, {1}), ("", {"num_beams": 2}, {4})):
        with closing(Translator(bundle, columns=Columns(score=score), num_threads=1, max_slots=4, **options)) as translator:
            asked.clear()  # of starts
            translator({"text": []})
            asked.clear()
            found = translator({"text": parallel.sources[:9]})
        assert asked == expected
        assert options or found["translation"] == parallel.targets[:9]
        assert not score or all(value < 0 for value in found["score"])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_get_columns_of_their_kind(translator: Translator, parallel: Parallel, kind: str) -> None:
    batch = KINDS[kind]({"text": parallel.sources[:9], "id": list(range(9))})
    found = translator(batch)
    assert isinstance(found, type(batch))
    assert column(found, "translation") == parallel.targets[:9] and column(found, "id") == list(range(9))
    assert column(found, "error") == [None] * 9
    assert "translation" not in batch, "the batch itself stays as it is"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_an_answer_have_their_reasons(translator: Translator, parallel: Parallel, kind: str) -> None:
    texts = [parallel.sources[0], "", "\n \t", "dog " * 600, parallel.sources[1]]
    found = translator(KINDS[kind]({"text": texts}))
    assert column(found, "translation") == [parallel.targets[0], None, None, None, parallel.targets[1]]
    reasons = column(found, "error")
    assert reasons[0] is reasons[4] is None and all(reason.startswith("text: ") for reason in reasons[1:4])
    assert "max_source_tokens" in reasons[3]


def test_values_that_are_no_text_are_errors_of_their_rows(translator: Translator, parallel: Parallel) -> None:
    found = translator({"text": [None, 3, float("nan"), b"dog", ["dog"], "half \ud800", parallel.sources[0]]})
    assert [error is not None for error in found["error"]] == [True] * 6 + [False]
    assert found["translation"] == [None] * 6 + [parallel.targets[0]]
    assert translator(pa.table({"text": pa.array([None, None], pa.string())})).schema.field("translation").type == pa.string()


def test_answers_do_not_depend_on_batches(translator: Translator, parallel: Parallel) -> None:
    for size in (1, 2, 7, 25):
        batches = ({"text": parallel.sources[start : start + size]} for start in range(0, 25, size))
        found = list(translator.map(batches))
        assert [len(batch["text"]) for batch in found] == [min(size, 25 - start) for start in range(0, 25, size)]
        assert [text for batch in found for text in batch["translation"]] == parallel.targets
    assert list(translator.map([])) == [] and translator({"text": []}) == {"text": [], "translation": [], "error": []}


def test_rows_of_the_next_batch_take_the_slots_that_become_free(bundle: Path, parallel: Parallel) -> None:
    ended: list[str] = []
    translator = Translator(bundle, max_slots=2, num_threads=1, split="sentences")
    translator({"text": parallel.sources[:1]})  # loaded
    long = translator.submit([" ".join(f"A dog runs through the snow for {number} hours." for number in range(200))])
    short = translator.submit([parallel.sources[0]])
    long.add_done_callback(lambda _: ended.append("long"))
    short.add_done_callback(lambda _: ended.append("short"))
    long.result(), short.result()
    assert ended == ["short", "long"]
    translator.close()


def test_batches_that_nobody_waits_for_are_cancelled(translator: Translator, parallel: Parallel) -> None:
    batches = translator.map({"text": parallel.sources} for _ in range(1000))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert translator({"text": parallel.sources[:1]})["translation"] == parallel.targets[:1]


def test_empty_batches_are_not_gathered(translator: Translator) -> None:
    taken: list[int] = []

    def batches() -> Iterator[dict[str, Any]]:
        for number in range(5000):
            taken.append(number)
            yield {"text": []}

    next(translator.map(batches()))
    assert len(taken) < 100


def test_close_ends_calls_and_frees_the_engine(bundle: Path, parallel: Parallel) -> None:
    translator = Translator(bundle, num_threads=1, max_slots=5)
    for _ in range(2):
        waiting = translator.submit([f"{source} {number}." for source in parallel.sources for number in range(40)])
        translator.close()
        with pytest.raises(CancelledError):
            waiting.result(timeout=20)
    del waiting
    gc.collect()
    assert not any(isinstance(each, LocalEngine) and each.settings.max_slots == 5 for each in gc.get_objects())


@pytest.mark.parametrize(
    ("num_threads", "slots_with_room", "max_slots"), [(0, 10**6, 256), (0, 100, 100), (1, 100, 64), (0, 0, 64)]
)
def test_engines_have_as_many_slots_as_memory_has_room_for(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int, slots_with_room: int, max_slots: int
) -> None:
    num_bytes = 2 * slots_with_room * slot_bytes(Bundle.open(bundle))  # half of it is for caches
    monkeypatch.setattr("dragoman.bulk.translator.room", lambda: Room(num_bytes, ""))
    monkeypatch.setattr("dragoman.bulk.translator.available_cores", lambda: 2)
    with closing(Translator(bundle, num_threads=num_threads)) as translator:
        assert translator.num_rows_at_once == REQUESTS_PER_SLOT * max_slots


def test_a_broken_engine_is_replaced(bundle: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator(bundle, num_threads=1)
    translator({"text": []})
    num_threads = threading.active_count()

    def step(_: Engine) -> None:
        raise EngineIsBroken("out of memory")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="engine"):
        broken.setattr(Engine, "step", step)
        translator({"text": parallel.sources})
    assert translator({"text": parallel.sources[:1]})["translation"] == parallel.targets[:1]
    assert threading.active_count() == num_threads
    translator.close()


def test_options_are_those_of_requests(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "animals.tsv").write_text("dog\tDackel\n")
    columns = Columns("source", "target", "", "score", "all", "took")
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 2, "columns": columns}
    translator = Translator(bundle, glossaries=str(tmp_path), glossary="animals", terms=[Term("snow", ["Matsch"])], **options)
    found = translator(pa.table({"source": ["A dog runs through the snow."]}))
    assert found.column_names == ["source", "target", "score", "all", "took"]
    (row,) = found.to_pylist()
    assert "Dackel" in row["target"] and "Matsch" in row["target"] and row["all"][0] == row["target"] and len(row["all"]) == 2
    assert row["score"] < 0 < row["took"]
    marked = Translator(bundle, markup="html", split="sentences")({"text": ["<p>A <b>dog</b> runs.</p><p>Two men sleep.</p>"]})
    (text,) = marked["translation"]
    assert text.startswith("<p>") and text.count("<p>") == 2 and "<b>" in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beam": 2}, "num_beam: there is no such option; num_beams"),
        ({"num_beams": "2"}, "num_beams"),
        ({"text": "a"}, "text: there is no such option"),
        ({"indexes": ()}, "indexes: there is no such option"),
        ({"num_beams": 1000}, "num_beams: 1000"),
        ({"target_language": "xx"}, "target_language: 'xx'"),
        ({"split": "words"}, "split: 'words'"),
        ({"glossary": "none"}, "glossary"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
    ],
)
def test_wrong_options_are_named_before_any_row(bundle: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Translator(bundle, **options)({"text": ["A dog."]})


def test_wrong_columns_and_bundles_are_named(translator: Translator, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column text: is not in the batch, which has texts"):
        translator({"texts": ["A dog."]})
    with pytest.raises(InputError, match="column text: is one text"):
        translator({"text": "A dog."})
    with pytest.raises(InputError, match="column error: is in the batch already"):
        translator({"text": ["A dog."], "error": [None]})
    with pytest.raises(InputError, match="column text: is the name of two columns"):
        Columns(error="text")
    for _ in range(2):
        with pytest.raises(InputError, match=str(tmp_path)):
            Translator(tmp_path)({"text": ["A dog."]})


def translate(translator: Translator, source: str) -> str:
    gc.collect()  # engines of the parent process must not be waited for
    return str(translator({"text": [source]})["translation"][0])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_load_the_bundle_themselves(bundle: Path, translator: Translator, parallel: Parallel, method: str) -> None:
    translate(Translator(bundle, num_threads=2), parallel.sources[0])  # loaded here, too
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(translate, (translator, parallel.sources[1])) == parallel.targets[1]
    assert pickle.loads(pickle.dumps(translator)).settings == translator.settings


def test_neither_sockets_nor_servers_are_loaded(bundle: Path) -> None:
    program = f"""if True:
        import sys
        from dragoman.bulk.translator import Translator
        Translator({str(bundle)!r})({{"text": ["A dog."]}})
        print(sorted({{"grpc", "zmq", "aiohttp", "torch"}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and not done.stderr
