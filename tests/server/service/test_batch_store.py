"""Files and batches in their folder: leftovers, damage, and work that goes on when its caller leaves."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from dragoman.server.service.batch_store import STALE_SECONDS, Batch, BatchStore, NoSuchObject, new_id

OLD = time.time() - 2 * STALE_SECONDS


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    store = BatchStore(tmp_path, 2**30)
    store.open()
    return store


def file_of(store: BatchStore, owner: str = "a") -> str:
    part = store.begin_file(owner, 10)
    return store.keep_file(part, part.stem, "lines.jsonl", "batch", 3600).id


def batch_of(store: BatchStore, owner: str = "a") -> Batch:
    now = int(time.time())
    batch = Batch(
        id=new_id("batch_"),
        endpoint="/v1/completions",
        input_file_id=file_of(store, owner),
        completion_window="24h",
        created_at=now,
        expires_at=now + 3600,
        owner=owner,
    )
    return batch


def test_a_batch_of_an_old_file_is_not_taken_for_a_leftover(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, write = batch_of(store), BatchStore.write_batch
    os.utime(store.path_of("a", batch.input_file_id), (OLD, OLD))

    def write_late(self: BatchStore, batch: Batch) -> None:
        assert self.open_batches() == []  # by the process that runs batches
        write(self, batch)

    monkeypatch.setattr(BatchStore, "write_batch", write_late)
    store.add_batch(batch)
    assert [each.id for each in store.open_batches()] == [batch.id]


def test_leftovers_are_removed_and_damaged_descriptions_stop_nothing(store: BatchStore, tmp_path: Path) -> None:
    damaged, batch = batch_of(store, "b"), batch_of(store)
    for each in (damaged, batch):
        store.add_batch(each)
    store.part_of(damaged, ".json").write_text("{")
    file = store.path_of("a", batch.input_file_id)
    (file.parent / f"{damaged.input_file_id}.json").write_text("{")
    left = [file.with_name(f"file-1{suffix}") for suffix in ("", ".part", ".new")]
    for path in left:
        path.touch()
        os.utime(path, (OLD, OLD))
    os.utime(file, (OLD, OLD))
    store.purge()
    assert not any(path.exists() for path in left) and file.exists()
    assert [each.id for each in store.open_batches()] == [batch.id]
    with pytest.raises(NoSuchObject):
        store.find_file("a", "file-" + "0" * 48)


def test_work_whose_caller_is_cancelled_ends_before_its_caller(store: BatchStore) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(10)
        has_ended.set()

    async def cancelled() -> None:
        task = asyncio.create_task(store.run(work))
        await asyncio.sleep(0.01)
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert has_ended.is_set()

    asyncio.run(cancelled())
