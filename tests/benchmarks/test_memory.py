"""What memory is measured along: requests that are the same each time, and every process by itself."""

import os
from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.memory import MAX_JOINED, SEARCHES, Traffic, resident_mib


def test_resident_memory_grows_with_what_is_written() -> None:
    before = resident_mib(os.getpid())
    block = bytearray(b"x" * (64 * 2**20))
    assert 50 < resident_mib(os.getpid()) - before < 200
    assert block[-1] == ord("x")


def test_traffic_is_the_same_each_time_and_has_every_length_and_search() -> None:
    first, second = Traffic(["a", "b", "c"]), Traffic(["a", "b", "c"])
    requests = [first.request() for _ in range(300)]
    assert requests == [second.request() for _ in range(300)]
    assert {len(text.split()) for text, _ in requests} == set(range(1, MAX_JOINED + 1))
    assert {id(search) for _, search in requests} == {id(search) for search in SEARCHES}


def test_a_row_for_each_part_of_a_real_servers_work(endless: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "NUM_PARTS", 2)
    rows = memory.measure(endless[1], ["a dog", "the grass"], 12, 1)
    assert [row["requests"] for row in rows] == [0, 6, 12]
    assert 0 == rows[0]["tokens"] < rows[1]["tokens"] < rows[2]["tokens"]
    assert all(float(row["front end MiB"]) > 10 and float(row["engine MiB"]) > 10 for row in rows)
    assert [row["engine growth"] for row in rows[:2]] == ["", ""] and rows[2]["engine growth"].endswith("%")
