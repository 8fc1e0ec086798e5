"""`Translator` in the pipelines of other libraries, each where it is installed."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dragoman.bulk import Columns, Translator
from tests.bulk.conftest import Parallel

COLUMNS = Columns(text="en", translation="de")
# Of other libraries, which this project cannot mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def frame(parallel: Parallel) -> pd.DataFrame:
    return pd.DataFrame({"en": [*parallel.sources, ""], "id": range(26)})


@pytest.fixture
def translate(bundle: Path) -> Iterator[Translator]:
    translator = Translator(bundle, columns=COLUMNS, num_threads=1)
    yield translator
    translator.close()


def check(rows: list[dict[str, Any]], parallel: Parallel) -> None:
    assert [row["de"] for row in rows] == [*parallel.targets, None]
    assert [row["id"] for row in rows] == list(range(26))
    assert [row["error"] for row in rows] == [None] * 25 + ["text: is blank"]


def test_datasets(frame: pd.DataFrame, translate: Translator, parallel: Parallel, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.config.HF_DATASETS_CACHE = tmp_path
    dataset = datasets.Dataset.from_pandas(frame).with_format("arrow")
    for num_processes in (None, 2):
        found = dataset.map(translate, batched=True, batch_size=5, num_proc=num_processes)
        check(found[:].to_pylist(), parallel)


def test_dask(frame: pd.DataFrame, translate: Translator, parallel: Parallel) -> None:
    dataframe = pytest.importorskip("dask.dataframe", reason="Dask is not installed")
    parts = dataframe.from_pandas(frame, npartitions=3)
    found = parts.map_partitions(translate, meta={"en": "str", "id": "int", "de": "str", "error": "str"}).compute()
    check(found.astype(object).where(found.notna(), None).to_dict("records"), parallel)


def test_daft(frame: pd.DataFrame, bundle: Path, parallel: Parallel) -> None:
    daft = pytest.importorskip("daft", reason="Daft is not installed")
    kind = daft.DataType.struct({"de": daft.DataType.string(), "error": daft.DataType.string()})

    @daft.cls
    class Translation:
        def __init__(self) -> None:
            self.translate = Translator(bundle, columns=COLUMNS, num_threads=1)

        @daft.method.batch(return_dtype=kind)
        def run(self, texts: Any) -> Any:
            found = self.translate({"en": texts.to_pylist()})
            return [{"de": de, "error": error} for de, error in zip(found["de"], found["error"], strict=True)]

    table = daft.from_pydict(frame.to_dict("list"))
    done = table.with_column("found", Translation().run(table["en"])).to_pylist()
    check([row | row["found"] for row in done], parallel)


def test_spark(frame: pd.DataFrame, translate: Translator, parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = pytest.importorskip("pyspark.sql", reason="Spark is not installed")
    if shutil.which("java") is None:
        pytest.skip("Java is not installed")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    session = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        rows = session.createDataFrame(frame).repartition(3)
        found = rows.mapInPandas(translate.map, "en string, id long, de string, error string").orderBy("id").collect()
        check([row.asDict() for row in found], parallel)
        found = rows.mapInArrow(translate.map, "en string, id long, de string, error string").orderBy("id").collect()
        check([row.asDict() for row in found], parallel)
    finally:
        session.stop()


def test_ray_data(frame: pd.DataFrame, bundle: Path, parallel: Parallel) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    data = pytest.importorskip("ray.data", reason="Ray is not installed")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        options = {"fn_constructor_args": [bundle], "fn_constructor_kwargs": {"columns": COLUMNS, "num_threads": 1}}
        for batch_format in ("numpy", "pandas", "pyarrow"):
            dataset = data.from_pandas(frame).map_batches(
                Translator, batch_size=8, batch_format=batch_format, compute=data.ActorPoolStrategy(size=1), **options
            )
            rows = sorted(dataset.take_all(), key=lambda row: int(row["id"]))
            check([{name: None if value != value else value for name, value in row.items()} for row in rows], parallel)
    finally:
        ray.shutdown()


def test_examples_of_the_docs_name_what_there_is() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/bulk.md").read_text()
    start = text.index("from dragoman.bulk import")
    names: dict[str, Any] = {}
    exec(text[start : text.index("\n\ndataset.")], names)  # the class, and a translator, which loads nothing yet
    assert isinstance(names["translate"], Translator) and os.path.basename(names["translate"].settings.bundle) == "en-de"
