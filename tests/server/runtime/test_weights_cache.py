"""The folder of a cache: entries are made once, whole or absent, private, and never read when damaged."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.server.runtime.weights_cache import LIST_FILE, LOCK_FILE, MAKING_PREFIX, UNUSED_SECONDS, Cache, CacheError

CONTENT = {"a": b"first" * 1000, "b": b"second"}


def fill(directory: Path, _: int) -> None:
    for name, content in CONTENT.items():
        (directory / name).write_bytes(content)


def refuse(*_: object) -> None:
    raise AssertionError("it is there already")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def content_of(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in CONTENT}


def names(cache: Cache) -> set[str]:
    return {path.name for path in cache.directory.iterdir()} - {LOCK_FILE}


def test_entry_is_made_once_even_for_many_at_once(cache: Cache, tmp_path: Path) -> None:
    assert cache.find("m-1") is None
    started, made, found = threading.Barrier(6), list[Path](), list[Path]()

    def make(directory: Path, lock: int) -> None:
        made.append(directory)
        fill(directory, lock)

    def engine() -> None:
        started.wait()
        found.append(Cache(tmp_path).find_or_make("m-1", make, 60).directory)

    threads = [threading.Thread(target=engine) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(Cache(tmp_path).find_or_make("m-1", refuse, 0).directory)
    assert len(made) == 1 and len(found) == 7 and len(set(found)) == 1 and content_of(found[0]) == CONTENT


def flip(directory: Path) -> None:
    content = bytearray((directory / "a").read_bytes())
    content[77] ^= 1
    (directory / "a").write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "an end": lambda directory: os.truncate(directory / "a", 10),
    "a file that is a pipe": lambda directory: ((directory / "b").unlink(), os.mkfifo(directory / "b")),
    "no list": lambda directory: (directory / LIST_FILE).unlink(),
    "another list": lambda directory: (directory / LIST_FILE).write_text('["a"]'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_made_again(cache: Cache, damage: str) -> None:
    DAMAGES[damage](cache.find_or_make("m-1", fill, 0).directory)
    assert cache.find("m-1") is None
    assert content_of(cache.find_or_make("m-1", fill, 0).directory) == CONTENT
    assert names(cache) == {"m-1"}


def test_failed_and_killed_makers_leave_nothing_that_is_read(cache: Cache) -> None:
    def fail(directory: Path, lock: int) -> None:
        fill(directory, lock)
        raise CacheError("no room")

    with pytest.raises(CacheError, match="no room"):
        cache.find_or_make("m-1", fail, 0)
    assert names(cache) == set()
    left = cache.directory / f"{MAKING_PREFIX}1" / "m-1"
    left.mkdir(parents=True)
    (left / "a").write_bytes(b"half")
    assert content_of(cache.find_or_make("m-1", fill, 0).directory) == CONTENT
    assert not left.parent.exists()


def test_lock_of_another_process_is_waited_for_and_inherited(cache: Cache) -> None:
    """A writer outlives the engine that started it: until it ends no other process may take its folder away."""
    with (cache.directory / LOCK_FILE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CacheError, match="another process"):
            cache.find_or_make("m-1", fill, 0)
    kept: list[int] = []

    def make(directory: Path, lock: int) -> None:
        kept.append(os.dup(lock))
        fill(directory, lock)

    cache.find_or_make("m-1", make, 0)
    with pytest.raises(CacheError, match="another process"):
        cache.find_or_make("m-2", fill, 0)
    os.close(kept[0])
    cache.find_or_make("m-2", fill, 0)


def grow_old(directory: Path) -> None:
    before = os.stat(directory / LIST_FILE).st_mtime - UNUSED_SECONDS - 60
    os.utime(directory / LIST_FILE, (before, before))


def test_unused_entries_of_the_same_thing_and_old_ones_are_removed(cache: Cache) -> None:
    in_use = cache.find_or_make("m-1", fill, 0)
    for name in ("m-2", "other-1", "m-3"):
        cache.find_or_make(name, fill, 0)
    assert names(cache) == {"m-1", "m-3", "other-1"} and content_of(in_use.directory) == CONTENT
    for name in names(cache):
        grow_old(cache.directory / name)
    assert cache.find("other-1") is not None, "opening counts as use"
    cache.find_or_make("new-1", fill, 0)
    assert names(cache) == {"m-1", "other-1", "new-1"}


def linked(directory: Path) -> None:
    directory.rmdir()
    (directory.parent / "theirs").mkdir(mode=0o700)
    directory.symlink_to(directory.parent / "theirs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((lambda directory, mode=mode: directory.chmod(mode), "nobody else's") for mode in (0o750, 0o705, 0o777)),
        (linked, "nobody else's"),
        (lambda directory: (directory.rmdir(), directory.write_text("")), "dragoman-"),
    ],
)
def test_folder_that_is_not_private_is_refused(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    before = os.umask(0)
    try:
        directory = Cache(tmp_path).directory
        assert directory.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    change(directory)
    with pytest.raises(CacheError, match=message):
        Cache(tmp_path)
