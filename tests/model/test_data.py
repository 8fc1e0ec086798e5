import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ModelConfig
from model.data import DataError, bucket, collate, pad, read_lines, read_parallel


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refuses(path: Path, message: str) -> pytest.RaisesExc[DataError]:
    """Expect an error that begins with the file."""
    return pytest.raises(DataError, match="^" + re.escape(f"{path}{message}"))


def test_lines_come_as_they_are(tmp_path) -> None:
    path = write(tmp_path / "a", "one\r\n two \u2028 still two\n\nvier\x0b\x0c ü".encode())
    assert read_lines(path) == ["one", " two \u2028 still two", "", "vier\x0b\x0c ü"]


def test_gzip_is_unpacked(tmp_path) -> None:
    assert read_lines(write(tmp_path / "a.gz", gzip.compress(b"eins\nzwei\n"))) == ["eins", "zwei"]


def test_missing_file_is_named(tmp_path) -> None:
    with refuses(tmp_path / "none", ": No such file or directory"):
        read_lines(tmp_path / "none")


def test_folder_in_place_of_a_file_is_named(tmp_path) -> None:
    with refuses(tmp_path, ": Is a directory"):
        read_lines(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("a", b""), ("a.gz", gzip.compress(b""))])
def test_empty_file_is_named(tmp_path, name, content) -> None:
    with refuses(tmp_path / name, ": the file is empty"):
        read_lines(write(tmp_path / name, content))


def test_line_that_is_not_utf8_is_numbered(tmp_path) -> None:
    path = write(tmp_path / "a", b"good\nba\xe9d\n")
    with refuses(path, ", line 2: not UTF-8: invalid continuation byte at byte 2"):
        read_lines(path)


PACKED = gzip.compress(bytes(range(256)) * 20)


@pytest.mark.parametrize(
    "content",
    [b"plain text", PACKED[: len(PACKED) // 2], PACKED[:-6] + b"\0" * 6, PACKED[:20] + b"\xff" * 40 + PACKED[60:]],
    ids=["not gzip", "cut short", "wrong checksum", "damaged inside"],
)
def test_bad_gzip_is_named(tmp_path, content) -> None:
    path = write(tmp_path / "a.gz", content)
    with refuses(path, ": "):
        read_lines(path)


def test_parallel_text_is_read(tmp_path) -> None:
    source, target = write(tmp_path / "s", b"a\nb\n"), write(tmp_path / "t", b"x\ny")
    assert read_parallel(source, target) == (["a", "b"], ["x", "y"])


def test_line_counts_that_differ_are_told(tmp_path) -> None:
    source, target = write(tmp_path / "s", b"a\nb\n"), write(tmp_path / "t", b"x\n")
    with refuses(source, f" has 2 lines but {target} has 1"):
        read_parallel(source, target)


@pytest.mark.parametrize("side", [0, 1])
def test_blank_line_is_numbered(tmp_path, side) -> None:
    contents = [b"a\nb\nc\n", b"a\nb\nc\n"]
    contents[side] = b"a\nb\n \t\n"
    source, target = write(tmp_path / "s", contents[0]), write(tmp_path / "t", contents[1])
    with refuses((source, target)[side], ", line 3: the line is blank"):
        read_parallel(source, target)


def test_padding_fills_up_on_the_right() -> None:
    assert pad([[5], [6, 7, 8], []], 9).tolist() == [[5, 9, 9], [6, 7, 8], [9, 9, 9]]


def test_batch_has_special_tokens_where_the_model_wants_them() -> None:
    config = ModelConfig(source_vocab_size=20, target_vocab_size=20, pad_id=0, eos_id=1, decoder_start_id=2)
    batch = collate([[5, 6], [7]], [[8], [9, 10, 11]], config)
    assert batch.source_ids.tolist() == [[5, 6, 1], [7, 1, 0]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.target_ids.tolist() == [[2, 8, 0, 0], [2, 9, 10, 11]]
    assert batch.labels.tolist() == [[8, 1, 0, 0], [9, 10, 11, 1]]
    assert batch.num_target_tokens == int((batch.labels != 0).sum()) == 6
    moved = batch.to(torch.device("cpu"))
    assert all(
        torch.equal(getattr(moved, name), getattr(batch, name)) for name in ("source_ids", "source_lengths", "target_ids", "labels")
    )
    assert moved.num_target_tokens == 6


PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None, database=None)
@given(lengths=PAIRS, max_tokens=st.integers(1, 200), seed=st.integers(0, 2**32))
def test_buckets_hold_each_pair_once_within_the_limit(lengths, max_tokens, seed) -> None:
    sources, targets = [[7] * s for s, _ in lengths], [[7] * t for _, t in lengths]
    batches = bucket(sources, targets, max_tokens, np.random.default_rng(seed))
    assert sorted(int(i) for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(max(lengths[i]) + 1 for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= max_tokens
    again = bucket(sources, targets, max_tokens, np.random.default_rng(seed))
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


def test_buckets_differ_from_epoch_to_epoch() -> None:
    rows = [[7] * (i % 10) for i in range(100)]
    first, second = ([batch.tolist() for batch in bucket(rows, rows, 50, np.random.default_rng(seed))] for seed in (1, 2))
    assert first != second


def test_buckets_waste_little() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    rows = [[7] * (int(length) - 1) for length in lengths]
    batches = bucket(rows, rows, 1000, np.random.default_rng(0))
    filled = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    assert lengths.sum() / filled > 0.95
    assert len(batches) < 1.1 * lengths.sum() / 1000
