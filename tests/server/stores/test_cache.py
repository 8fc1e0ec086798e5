"""Files by their SHA-256, within a bound, shared by processes."""

import fcntl
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from dragoman.export.bundle import BundleError, FileEntry
from dragoman.server.stores.cache import Cache, put

KIB = 1024 / 2**30


def entry(content: bytes) -> FileEntry:
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


def filling(content: bytes) -> Callable[[IO[bytes]], None]:
    def fill(file: IO[bytes]) -> None:
        file.truncate(0)
        file.write(content)

    return fill


def nothing(_: IO[bytes]) -> None:
    raise AssertionError("is there already")


def never() -> bool:
    return False


def keep(cache: Cache, content: bytes) -> Path:
    with cache.hold({"it": entry(content)}, "it"):
        return cache.obtain(entry(content), filling(content), never)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (*folder.glob("objects/*/*"), *folder.glob("partial/*")))


def test_a_file_is_made_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = keep(cache, b"weights")
    with cache.hold({"it": entry(b"weights")}, "it"):
        assert cache.obtain(entry(b"weights"), nothing, never) == path
    assert path.read_bytes() == b"weights" and not path.stat().st_mode & 0o222


def test_a_file_that_was_damaged_on_disk_is_made_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = keep(cache, b"weights")
    path.chmod(0o644)
    path.write_bytes(b"weighty")
    assert keep(cache, b"weights").read_bytes() == b"weights"


def test_the_least_recently_used_go_first_and_only_as_many_as_must(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * KIB)
    contents = [bytes([number]) * 3000 for number in range(5)]
    paths = [keep(cache, content) for content in contents[:3]]
    keep(cache, contents[0])  # used again
    keep(cache, contents[3])
    assert [path.exists() for path in paths] == [True, False, True]
    assert size(tmp_path) <= cache.max_bytes


def test_what_is_held_stays_whoever_needs_room(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path, 10 * KIB), Cache(tmp_path, 10 * KIB)
    first, second = b"1" * 6000, b"2" * 6000
    with cache.hold({"it": entry(first)}, "first"):
        path = cache.obtain(entry(first), filling(first), never)
        with (
            pytest.raises(BundleError, match=r"second: .* of which other pulls need 6000"),
            other.hold({"it": entry(second)}, "second"),
        ):
            pass
        assert path.exists()
        with other.hold({"it": entry(first)}, "the same"):
            assert other.obtain(entry(first), nothing, never) == path
    keep(other, second)
    assert not path.exists()


def test_more_than_the_bound_is_refused_by_name(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 * KIB)
    path = keep(cache, b"small")
    files = {"a": entry(b"a" * 1024), "b": entry(b"b" * 1024)}
    refused = pytest.raises(BundleError, match=rf"large: has 2048 bytes, and the cache in {tmp_path} may hold 1024")
    with refused, cache.hold(files, "large"):
        pass
    assert path.exists()


def test_a_file_that_a_bundle_has_twice_counts_once(tmp_path: Path) -> None:
    with Cache(tmp_path, 1 * KIB).hold({"a": entry(b"a" * 1024), "b": entry(b"a" * 1024)}, "twins"):
        pass


def hold_for_ever(folder: str, content: bytes, is_stand_in: object) -> None:
    cache = Cache(Path(folder), 10 * KIB)
    with cache.hold({"it": entry(content)}, "it"):

        def fill(file: IO[bytes]) -> None:
            file.write(content[:100])
            is_stand_in.set()  # type: ignore[attr-defined]
            signal.pause()

        cache.obtain(entry(content), fill, never)


def test_who_is_killed_holds_nothing_and_leaves_what_came(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    is_stand_in, content = context.Event(), b"3" * 6000
    process = context.Process(target=hold_for_ever, args=(str(tmp_path), content, is_stand_in))
    process.start()
    is_stand_in.wait()
    partial = tmp_path / "partial" / entry(content).sha256
    with partial.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    found: list[int] = []

    def go_on(file: IO[bytes]) -> None:
        found.append(os.fstat(file.fileno()).st_size)
        file.write(content[100:])

    cache = Cache(tmp_path, 10 * KIB)
    with cache.hold({"it": entry(content)}, "it"):
        assert cache.obtain(entry(content), go_on, never).read_bytes() == content
    assert found == [100]
    assert list((tmp_path / "held").iterdir()) == []


def test_partial_files_count_and_go_too(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * KIB)

    def break_off(file: IO[bytes]) -> None:
        file.write(b"4" * 5000)
        raise ConnectionError

    with cache.hold({"it": entry(b"4" * 6000)}, "it"), pytest.raises(ConnectionError):
        cache.obtain(entry(b"4" * 6000), break_off, never)
    assert size(tmp_path) == 5000
    keep(cache, b"5" * 9000)
    assert size(tmp_path) == 9000


def test_a_second_place_is_the_same_file_or_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = keep(Cache(tmp_path / "cache"), b"weights")
    put(source, tmp_path / "a/b/linked")
    assert (tmp_path / "a/b/linked").samefile(source)

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    put(source, tmp_path / "copied")
    assert not (tmp_path / "copied").samefile(source) and (tmp_path / "copied").read_bytes() == b"weights"
