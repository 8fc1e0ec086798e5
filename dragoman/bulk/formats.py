"""Formats of bulk files: each cuts a stream into shards, finds the texts in a shard, and adds columns to it.

| kind | names | rows |
|---|---|---|
| lines | `.txt`, and any other | lines; the output has the translations alone, a line each |
| json | `.jsonl`, `.ndjson` | objects; other fields keep their bytes |
| csv, tsv | `.csv`, `.tsv` | records below a header |
| parquet | `.parquet` | rows; other columns keep their types and values |

All but Parquet may be compressed as `.gz` or `.zst`; the output is, too.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

import msgspec

from dragoman.bulk.translator import Columns, Outcome, with_columns
from dragoman.model.errors import InputError

# Of a line or a record, and of the rows of a shard together, more or less.
MAX_ROW_BYTES, MAX_SHARD_BYTES = 16 * 2**20, 32 * 2**20
COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
_LINE_BREAKS = str.maketrans("\n\r", "  ")


class Cut(NamedTuple):
    """Rows of a file in their own encoding; `head` is what rows of a CSV file need to be read.

    `share` is the part of the file's rows up to its end, if the position in the file does not tell.
    """

    content: bytes
    num_rows: int
    head: bytes = b""
    share: float | None = None


class Rows(Protocol):
    """The rows of a cut."""

    @property
    def texts(self) -> Sequence[object]:
        """Their texts; an `InputError` is the error of its row, and so is anything else than a string."""

    def written(self, outcomes: list[Outcome], columns: Columns) -> bytes:
        """Return the file of the rows with the added columns."""


class Format(Protocol):
    """A kind of files."""

    def cut(self, stream: BinaryIO, num_rows: int, columns: Columns) -> Iterator[Cut]:
        """Yield a file's rows, at most `num_rows` at a time, and at least one cut; raise `InputError` if it cannot be read."""

    def read(self, cut: Cut, columns: Columns) -> Rows:
        """Return the rows of a cut."""


_KINDS: Final = {"txt": "lines", "jsonl": "json", "ndjson": "json", "csv": "csv", "tsv": "tsv", "parquet": "parquet"}


def kind_of(name: str) -> tuple[str, str]:
    """Return the kind of a file by its name, lines if it says nothing, and the suffix of its compression."""
    compression = next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), "")
    return _KINDS.get(_suffix(name), "lines"), compression


def is_known(name: str) -> bool:
    """Return whether a file's name says its kind."""
    return _suffix(name) in _KINDS


def _suffix(name: str) -> str:
    lower = name.lower()
    return next((lower.removesuffix(end) for end in COMPRESSIONS if lower.endswith(end)), lower).rpartition(".")[2]


def decompressed(stream: BinaryIO, compression: str) -> BinaryIO:
    """Return a stream of the content."""
    if not compression:
        return stream
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(stream, COMPRESSIONS[compression]))


def compressed(content: bytes, compression: str) -> bytes:
    """Return content as it is written."""
    if not compression:
        return content
    import pyarrow as pa

    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, COMPRESSIONS[compression]) as stream:
        stream.write(content)
    return bytes(out.getvalue())


class Lines:
    """Text files; a line without UTF-8 is an error of its row."""

    def cut(self, stream: BinaryIO, num_rows: int, columns: Columns) -> Iterator[Cut]:
        if extra := [name for name, attribute in columns.added().items() if attribute not in ("translation", "error")]:
            raise InputError(f"column {extra[0]}: text files have none; use JSON lines, CSV or Parquet")
        return _cut_lines(stream, num_rows)

    def read(self, cut: Cut, columns: Columns) -> "LineRows":
        return LineRows(cut.content)


class LineRows:
    """Lines of a text file."""

    def __init__(self, content: bytes) -> None:
        self._lines = content.split(b"\n")[: -1 if content.endswith(b"\n") or not content else None]
        self.texts: Sequence[object] = [line.removesuffix(b"\r").decode("utf-8", "surrogateescape") for line in self._lines]

    def written(self, outcomes: list[Outcome], columns: Columns) -> bytes:
        answers = ("" if one.translation is None else one.translation.translate(_LINE_BREAKS) for one in outcomes)
        ends = ("\r\n" if line.endswith(b"\r") else "\n" for line in self._lines)
        return "".join(map("".join, zip(answers, ends, strict=True))).encode()


class JsonLines:
    """Files with a JSON object on each line; blank lines are no rows."""

    def cut(self, stream: BinaryIO, num_rows: int, columns: Columns) -> Iterator[Cut]:
        return _cut_lines(stream, num_rows, keeps_blank=False)

    def read(self, cut: Cut, columns: Columns) -> "JsonRows":
        return JsonRows(cut.content, columns)


class JsonRows:
    """Objects; a line that cannot be used has an error in an object of its own."""

    def __init__(self, content: bytes, columns: Columns) -> None:
        decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._rows: list[Mapping[str, msgspec.Raw]] = []
        self.texts: list[object] = []
        for line in filter(bytes.strip, content.split(b"\n")):
            try:
                row = decoder.decode(line)
                text = msgspec.json.decode(row[columns.text]) if columns.text in row else None
                if taken := [name for name in columns.added() if name in row]:
                    text = InputError(f"row: has a field {taken[0]} already")
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                text = InputError("row: is no JSON object")
            self._rows.append({} if isinstance(text, InputError) else row)
            self.texts.append(text)

    def written(self, outcomes: list[Outcome], columns: Columns) -> bytes:
        rows = zip(self._rows, outcomes, strict=True)
        return b"".join(msgspec.json.encode({**row, **_values(outcome, columns)}) + b"\n" for row, outcome in rows)


class Delimited:
    """CSV and TSV files, whose first record names the columns; bytes that are not UTF-8 are kept.

    Quotes that would merge lines or vanish, as in files written without quoting, are refused.
    """

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter

    def cut(self, stream: BinaryIO, num_rows: int, columns: Columns) -> Iterator[Cut]:
        csv.field_size_limit(MAX_ROW_BYTES)
        text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
        records = csv.reader(text, delimiter=self._delimiter, strict=True)
        try:
            names = next(filter(None, records), [])
            _check_columns(names, columns)
            head = self._encoded([names])
            rows: list[list[str]] = []
            num_bytes, is_first = 0, True
            for record in records:
                if not record:
                    continue
                rows.append(record)
                num_bytes += sum(map(len, record))
                if len(rows) == num_rows or num_bytes >= MAX_SHARD_BYTES:
                    yield Cut(self._encoded(rows), len(rows), head)
                    rows, num_bytes, is_first = [], 0, False
            if rows or is_first:
                yield Cut(self._encoded(rows), len(rows), head)
        except csv.Error as error:
            raise InputError(f"line {records.line_num}: {error}") from None
        finally:
            text.detach()

    def read(self, cut: Cut, columns: Columns) -> "DelimitedRows":
        return DelimitedRows(self._decoded(cut.head)[0], self._decoded(cut.content), columns, self._encoded)

    def _encoded(self, records: Iterable[Sequence[str]]) -> bytes:
        out = io.StringIO(newline="")
        plain, quoted = (
            csv.writer(out, delimiter=self._delimiter, lineterminator="\n", quoting=quoting)
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        )
        for record in records:  # the writer leaves a carriage return without quotes
            (quoted if any("\r" in value for value in record) else plain).writerow(record)
        return out.getvalue().encode("utf-8", "surrogateescape")

    def _decoded(self, content: bytes) -> list[list[str]]:
        csv.field_size_limit(MAX_ROW_BYTES)
        return list(csv.reader(io.StringIO(content.decode("utf-8", "surrogateescape"), newline=""), delimiter=self._delimiter))


class DelimitedRows:
    """Records."""

    def __init__(self, names: list[str], records: list[list[str]], columns: Columns, encoded: Any) -> None:
        self._names, self._records, self._encoded = names, records, encoded
        place = names.index(columns.text)
        self.texts: Sequence[object] = [
            InputError(f"row: has {len(record)} fields, the header {len(names)}")
            if len(record) > len(names)
            else (record[place] if len(record) > place else None)
            for record in records
        ]

    def written(self, outcomes: list[Outcome], columns: Columns) -> bytes:
        names = list(columns.added())
        records = [[*self._names, *names]]
        for record, outcome in zip(self._records, outcomes, strict=True):
            values = _values(outcome, columns)
            padding = [""] * (len(self._names) - len(record))
            records.append([*record[: len(self._names)], *padding, *(_cell(values[name]) for name in names)])
        return bytes(self._encoded(records))


class Parquet:
    """Parquet files; a cut is a record batch in Arrow's stream format."""

    def cut(self, stream: BinaryIO, num_rows: int, columns: Columns) -> Iterator[Cut]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not stream.seekable():
            raise InputError("Parquet files are compressed inside, not as a whole")
        try:
            file = pq.ParquetFile(stream)
            _check_columns(file.schema_arrow.names, columns)
            num_done = 0
            for batch in file.iter_batches(num_rows):
                for part in _parts(batch):
                    num_done += part.num_rows
                    yield Cut(self._encoded(part), part.num_rows, share=num_done / file.metadata.num_rows)
            if not num_done:
                yield Cut(self._encoded(pa.RecordBatch.from_pylist([], file.schema_arrow)), 0, share=1.0)
        except pa.ArrowException as error:
            raise InputError(str(error).partition("\n")[0]) from None

    def read(self, cut: Cut, columns: Columns) -> "ParquetRows":
        import pyarrow as pa

        with pa.ipc.open_stream(cut.content) as stream:
            return ParquetRows(stream.read_all(), columns)

    @staticmethod
    def _encoded(batch: Any) -> bytes:
        import pyarrow as pa

        out = io.BytesIO()
        with pa.ipc.new_stream(out, batch.schema) as writer:
            writer.write_batch(batch)
        return out.getvalue()


class ParquetRows:
    """An Arrow table."""

    def __init__(self, table: Any, columns: Columns) -> None:
        self._table = table
        self.texts: Sequence[object] = table.column(columns.text).to_pylist()

    def written(self, outcomes: list[Outcome], columns: Columns) -> bytes:
        import pyarrow.parquet as pq

        out = io.BytesIO()
        pq.write_table(with_columns(self._table, outcomes, columns), out)
        return out.getvalue()


FORMATS: Final[Mapping[str, Format]] = {
    "lines": Lines(),
    "json": JsonLines(),
    "csv": Delimited(","),
    "tsv": Delimited("\t"),
    "parquet": Parquet(),
}


def _cut_lines(stream: BinaryIO, num_rows: int, *, keeps_blank: bool = True) -> Iterator[Cut]:
    lines: list[bytes] = []
    num_bytes, number, is_first = 0, 0, True
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise InputError(f"line {number}: more than {MAX_ROW_BYTES} bytes")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if keeps_blank or line.strip():
            lines.append(line)
            num_bytes += len(line)
        if len(lines) == num_rows or num_bytes >= MAX_SHARD_BYTES:
            yield Cut(b"".join(lines), len(lines))
            lines, num_bytes, is_first = [], 0, False
    if lines or is_first:
        yield Cut(b"".join(lines), len(lines))


def _parts(batch: Any) -> Iterator[Any]:
    """Yield a batch in parts of at most about `MAX_SHARD_BYTES`."""
    if batch.nbytes <= MAX_SHARD_BYTES or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


def _check_columns(names: Sequence[str], columns: Columns) -> None:
    if names.count(columns.text) != 1:
        there = "twice" if columns.text in names else f"not among {', '.join(names) or 'none'}"
        raise InputError(f"column {columns.text}: is {there}")
    if taken := [name for name in columns.added() if name in names]:
        raise InputError(f"column {taken[0]}: is there already; choose another name")


def _values(outcome: Outcome, columns: Columns) -> dict[str, Any]:
    return {name: getattr(outcome, attribute) for name, attribute in columns.added().items()}


def _cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
