"""Files of every kind: all rows in order, everything else as it was, cut into shards of any size."""

import csv
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.bulk.formats import FORMATS, Cut, compressed, decompressed, is_known, kind_of
from dragoman.bulk.translator import Columns, Outcome
from dragoman.model.errors import InputError

COLUMNS = Columns()
ALL = Columns(score="score", alternatives="all", seconds="took")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def answer(text: object) -> Outcome:
    """Return a translation that says what its text was, or an error."""
    if isinstance(text, str) and text.strip():
        return Outcome(text.upper(), None, -0.5, [text.upper()], 2.0)
    return Outcome(error=str(text) if isinstance(text, InputError) else "no")


def translated(kind: str, content: bytes, num_rows: int = 2, columns: Columns = COLUMNS) -> list[bytes]:
    """Return the output files of a file."""
    outputs = []
    for cut in FORMATS[kind].cut(io.BytesIO(content), num_rows, columns):
        rows = FORMATS[kind].read(cut, columns)
        assert len(rows.texts) == cut.num_rows <= num_rows
        outputs.append(rows.written([answer(text) for text in rows.texts], columns))
    return outputs


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", ("lines", "")),
        ("corpus.en", ("lines", "")),
        ("corpus.en.GZ", ("lines", ".gz")),
        ("a.jsonl.zst", ("json", ".zst")),
        ("a.TSV", ("tsv", "")),
        ("a.parquet", ("parquet", "")),
    ],
)
def test_names_say_the_kind(name: str, kind: tuple[str, str]) -> None:
    assert kind_of(name) == kind
    assert is_known(name) == ("corpus" not in name)


def test_lines_keep_their_number_and_their_ends() -> None:
    content = "\ufeffone\r\n\ntwo\nthree\ufeff\u2028\x0cfour\n \nfive".encode()
    assert b"".join(translated("lines", content)).decode() == "ONE\r\n\nTWO\nTHREE\ufeff\u2028\x0cFOUR\n\nFIVE\n"
    assert translated("lines", b"") == [b""]
    (cut,) = FORMATS["lines"].cut(io.BytesIO(b"a\xff\n"), 5, COLUMNS)
    assert FORMATS["lines"].read(cut, COLUMNS).texts == ["a\udcff"], "an error of the row, later"
    assert FORMATS["lines"].read(Cut(b"a\n", 1), COLUMNS).written([Outcome("x\ny\r")], COLUMNS) == b"x y \n"
    with pytest.raises(InputError, match="column score: text files have none"):
        list(FORMATS["lines"].cut(io.BytesIO(b"a"), 1, ALL))


def test_other_fields_of_json_keep_their_bytes() -> None:
    first = '{"id": 1.0, "text": "a", "x": {"y" : [1e3, null]}}'
    deep = f'{{"a":{"[" * 5000}{"]" * 5000}}}'
    rows = [first, "", '{"text": 5}', "[1]", deep, '{"a":1}', '{"error":"mine"}']
    outputs = translated("json", "\n".join(rows).encode(), columns=ALL)
    lines = b"".join(outputs).decode().splitlines()
    assert len(outputs) == 3 and len(lines) == 6
    assert '"id":1.0' in lines[0] and '{"y" : [1e3, null]}' in lines[0]
    found = [json.loads(line) for line in lines]
    assert found[0] | {"translation": "A", "error": None, "score": -0.5, "all": ["A"], "took": 2.0} == found[0]
    assert found[1]["text"] == 5 and found[1]["error"] == "no"
    assert [row["error"] for row in found[2:4]] == ["row: is no JSON object"] * 2
    assert found[4] | {"a": 1, "error": "no", "translation": None} == found[4]
    assert found[5]["error"] == "row: has a field error already"


def read(content: bytes, delimiter: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode(), newline=""), delimiter=delimiter))


@pytest.mark.parametrize(("kind", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_records_keep_quotes_and_line_breaks(kind: str, delimiter: str) -> None:
    rows = [["id", "text"], ["1", 'say "a",\tb\r\nc'], ["2"], ["3", ""], ["4", "d"], ["5", "e", "extra"]]
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([*rows[:2], [], *rows[2:]])
    outputs = translated(kind, b"\xef\xbb\xbf" + out.getvalue().encode(), columns=Columns(alternatives="all"))
    found = [read(output, delimiter) for output in outputs]
    assert {tuple(each[0]) for each in found} == {("id", "text", "translation", "error", "all")}
    records = [record for each in found for record in each[1:]]
    assert records[0] == [*rows[1], 'SAY "A",\tB\r\nC', "", json.dumps([rows[1][1].upper()])]
    assert records[1] == ["2", "", "", "no", ""] and records[2] == ["3", "", "", "no", ""]
    assert records[4] == ["5", "e", "", "row: has 3 fields, the header 2", ""], "its text may be cut, its fields elsewhere"
    assert translated(kind, f"text{delimiter}b\n".encode()) == [
        f"text{delimiter}b{delimiter}translation{delimiter}error\n".encode()
    ]


@given(st.lists(st.lists(TEXTS, min_size=2, max_size=2)), st.integers(1, 5))
def test_any_record_survives(rows: list[list[str]], num_rows: int) -> None:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["text", "other"], *rows])
    outputs = translated("csv", out.getvalue().encode(), num_rows)
    found = [record for output in outputs for record in read(output, ",")[1:]]
    assert [record[:2] for record in found] == rows
    assert [record[2] for record in found] == [(answer(text).translation or "") for text, _ in rows]


def test_nested_columns_of_parquet_are_untouched() -> None:
    types = {
        "text": pa.string(),
        "nested": pa.struct({"a": pa.list_(pa.decimal128(9, 2)), "b": pa.map_(pa.string(), pa.timestamp("us", "UTC"))}),
        "kind": pa.dictionary(pa.int8(), pa.string()),
    }
    schema = pa.schema(types.items(), metadata={"origin": "here"})
    nested = [{"a": [1, None], "b": [("k", 5)]}, None, {"a": None, "b": []}]
    table = pa.table({"text": ["a", None, "c"], "nested": nested, "kind": ["x", "y", "x"]}, schema)
    out = io.BytesIO()
    pq.write_table(table, out)
    outputs = translated("parquet", out.getvalue(), columns=ALL)
    found = pa.concat_tables(pq.read_table(io.BytesIO(each)) for each in outputs)
    assert found.select(table.column_names).cast(schema).equals(table)
    assert found["translation"].to_pylist() == ["A", None, "C"] and found["error"].to_pylist() == [None, "no", None]
    assert found.schema.field("all").type == pa.list_(pa.string()) and found.schema.metadata[b"origin"] == b"here"
    empty = io.BytesIO()
    pq.write_table(table.slice(0, 0), empty)
    (output,) = translated("parquet", empty.getvalue())
    assert pq.read_table(io.BytesIO(output)).column_names == [*types, "translation", "error"]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ""])
def test_compression_is_undone_and_done_again(suffix: str) -> None:
    content = b"line\n" * 100_000
    packed = compressed(content, suffix)
    assert packed == compressed(content, suffix), "it holds no time"
    assert decompressed(io.BytesIO(packed), suffix).read() == content
    if suffix == ".gz":
        assert gzip.decompress(packed) == content
        assert decompressed(io.BytesIO(gzip.compress(b"a\n") + gzip.compress(b"b\n")), suffix).read() == b"a\nb\n", (
            "several members"
        )


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        ("lines", b"a\n" + b"x" * (17 * 2**20), "line 2: more than"),
        ("json", b"x" * (17 * 2**20), "line 1: more than"),
        ("csv", b"id,name\n1,a\n", "column text: is not among id, name"),
        ("csv", b"", "column text: is not among none"),
        ("csv", b"text,text\n", "column text: is twice"),
        ("csv", b"text,error\n", "column error: is there already"),
        ("tsv", b'id\ttext\n1\t"Oh," he said.\n', "line 2: '\t' expected after '\"'"),
        ("tsv", b'text\n"one\ntwo\n', "line 3: unexpected end of data"),
        ("csv", b"text\n" + b"x" * (17 * 2**20), "line 2: field larger"),
        ("parquet", b"no parquet", "Parquet"),
    ],
)
def test_files_that_cannot_be_read_are_refused(kind: str, content: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        list(FORMATS[kind].cut(io.BytesIO(content), 10, COLUMNS))


def test_large_rows_make_small_shards() -> None:
    lines = [b"x" * 2**20 + b"\n"] * 80
    cuts = list(FORMATS["lines"].cut(io.BytesIO(b"".join(lines)), 1000, COLUMNS))
    assert len(cuts) == 3 and sum(cut.num_rows for cut in cuts) == 80
    out = io.BytesIO()
    pq.write_table(pa.table({"text": [line.decode() for line in lines]}), out)
    cuts = list(FORMATS["parquet"].cut(out, 1000, COLUMNS))
    assert max(cut.num_rows for cut in cuts) <= 33 and [cut.share for cut in cuts] == [0.25, 0.5, 0.75, 1.0]
