"""A cache's folder: made once, whole or not there, nobody else's, and never read when it is not what was made."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.server.runtime import weights_cache
from dragoman.server.runtime.weights_cache import LIST_FILE, LOCK_FILE, MAKING_PREFIX, UNUSED_SECONDS, Cache, CacheError

NOBODY = 65534
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


def test_what_was_made_is_found(cache: Cache, tmp_path: Path) -> None:
    assert cache.find("m-1") is None
    made = cache.find_or_make("m-1", fill, 0)
    assert content_of(made.directory) == CONTENT
    found = Cache(tmp_path).find_or_make("m-1", refuse, 0)
    assert found.directory == made.directory


def test_many_at_once_make_it_once(tmp_path: Path) -> None:
    started = threading.Barrier(6)
    made: list[Path] = []
    found: list[Path] = []

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
    assert len(made) == 1 and len(found) == 6 and len(set(found)) == 1


def flip(directory: Path) -> None:
    content = bytearray((directory / "a").read_bytes())
    content[77] ^= 1
    (directory / "a").write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "an end": lambda directory: os.truncate(directory / "a", 10),
    "a file": lambda directory: (directory / "b").unlink(),
    "a file that is a pipe": lambda directory: ((directory / "b").unlink(), os.mkfifo(directory / "b")),
    "no list": lambda directory: (directory / LIST_FILE).unlink(),
    "half a list": lambda directory: os.truncate(directory / LIST_FILE, 30),
    "an empty list": lambda directory: (directory / LIST_FILE).write_text("{}"),
    "another list": lambda directory: (directory / LIST_FILE).write_text('["a"]'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_made_again(cache: Cache, damage: str) -> None:
    directory = cache.find_or_make("m-1", fill, 0).directory
    DAMAGES[damage](directory)
    assert cache.find("m-1") is None
    assert content_of(cache.find_or_make("m-1", fill, 0).directory) == CONTENT
    assert {path.name for path in cache.directory.iterdir()} == {LOCK_FILE, "m-1"}


def test_what_was_made_again_meanwhile_is_not_held_by_the_lock_of_what_is_gone(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others would have found the new one unused, and removed it."""
    made = cache.find_or_make("m-1", fill, 0).directory
    compare = weights_cache._is_same

    def compare_late(*found: Any) -> bool:
        monkeypatch.undo()
        made.rename(tmp_path / "old")
        Cache(tmp_path).find_or_make("m-1", fill, 0)
        return compare(*found)

    monkeypatch.setattr(weights_cache, "_is_same", compare_late)
    assert cache.find("m-1") is None
    assert cache.find("m-1") is not None


def test_what_fails_leaves_nothing(cache: Cache) -> None:
    def fail(directory: Path, lock: int) -> None:
        fill(directory, lock)
        raise CacheError("no room")

    with pytest.raises(CacheError, match="no room"):
        cache.find_or_make("m-1", fail, 0)
    assert {path.name for path in cache.directory.iterdir()} == {LOCK_FILE}


def test_what_the_killed_have_left_is_removed_and_never_read(cache: Cache) -> None:
    left = cache.directory / f"{MAKING_PREFIX}1" / "m-1"
    left.mkdir(parents=True)
    (left / "a").write_bytes(b"half")
    assert content_of(cache.find_or_make("m-1", fill, 0).directory) == CONTENT
    assert not left.parent.exists()


def test_who_waits_too_long_is_told(cache: Cache) -> None:
    with (cache.directory / LOCK_FILE).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CacheError, match="another process"):
            cache.find_or_make("m-1", fill, 0)


def test_the_lock_lives_in_who_inherits_it(cache: Cache) -> None:
    """A writer outlives the engine that has started it: until it ends nobody may take its folder away."""
    kept: list[int] = []

    def make(directory: Path, lock: int) -> None:
        kept.append(os.dup(lock))
        fill(directory, lock)

    cache.find_or_make("m-1", make, 0)
    with pytest.raises(CacheError, match="another process"):
        cache.find_or_make("m-2", fill, 0)
    os.close(kept[0])
    cache.find_or_make("m-2", fill, 0)


def test_others_of_the_same_go_when_nobody_uses_them(cache: Cache) -> None:
    in_use = cache.find_or_make("m-1", fill, 0)
    cache.find_or_make("m-2", fill, 0)
    cache.find_or_make("other-1", fill, 0)
    cache.find_or_make("m-3", fill, 0)
    assert {path.name for path in cache.directory.iterdir()} == {LOCK_FILE, "m-1", "m-3", "other-1"}
    assert content_of(in_use.directory) == CONTENT


def test_what_nobody_has_opened_for_long_goes_unless_it_is_in_use(cache: Cache) -> None:
    in_use = cache.find_or_make("used-1", fill, 0)
    old = cache.find_or_make("old-1", fill, 0).directory
    for directory in (in_use.directory, old):
        before = os.stat(directory / LIST_FILE).st_mtime - UNUSED_SECONDS - 60
        os.utime(directory / LIST_FILE, (before, before))
    cache.find_or_make("m-1", fill, 0)
    assert {path.name for path in cache.directory.iterdir()} == {LOCK_FILE, "m-1", "used-1"}


def test_opening_counts_as_use(cache: Cache) -> None:
    directory = cache.find_or_make("a-1", fill, 0).directory
    before = os.stat(directory / LIST_FILE).st_mtime - UNUSED_SECONDS - 60
    os.utime(directory / LIST_FILE, (before, before))
    assert cache.find("a-1") is not None
    cache.find_or_make("m-1", fill, 0)
    assert directory.exists()


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_that_others_may_look_into_is_refused(tmp_path: Path, mode: int) -> None:
    Cache(tmp_path).directory.chmod(mode)
    with pytest.raises(CacheError, match="nobody else's"):
        Cache(tmp_path)


def test_a_folder_of_ours_is_for_us_alone_whatever_new_files_get(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert Cache(tmp_path).directory.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / f"dragoman-{os.geteuid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(CacheError, match="nobody else's"):
        Cache(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    directory = Cache(tmp_path).directory
    os.chown(directory, NOBODY, NOBODY)
    with pytest.raises(CacheError, match="must be a folder of this user"):
        Cache(tmp_path)


def test_a_place_where_no_folder_can_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="file"):
        Cache(tmp_path / "file")
