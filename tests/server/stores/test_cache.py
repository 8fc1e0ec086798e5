"""The cache: files by their SHA-256, within a bound, shared by processes."""

import hashlib
import os
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


def obtain(cache: Cache, content: bytes, fill: Callable[[IO[bytes]], None]) -> Path:
    return cache.obtain(entry(content), fill, lambda: False)


def keep(cache: Cache, content: bytes) -> Path:
    with cache.hold({"it": entry(content)}, "it"):
        return obtain(cache, content, filling(content))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (*folder.glob("objects/*/*"), *folder.glob("partial/*")))


def test_file_is_made_once_and_again_if_it_was_damaged(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = keep(cache, b"weights")
    with cache.hold({"it": entry(b"weights")}, "it"):
        assert obtain(cache, b"weights", nothing) == path
    assert path.read_bytes() == b"weights" and not path.stat().st_mode & 0o222
    path.chmod(0o644)
    path.write_bytes(b"weighty")
    assert keep(cache, b"weights").read_bytes() == b"weights"


def test_least_recently_used_files_go_first_and_only_as_many_as_must(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10 * KIB)
    contents = [bytes([number]) * 3000 for number in range(5)]
    paths = [keep(cache, content) for content in contents[:3]]
    keep(cache, contents[0])
    keep(cache, contents[3])
    assert [path.exists() for path in paths] == [True, False, True] and size(tmp_path) <= cache.max_bytes

    def break_off(file: IO[bytes]) -> None:
        file.write(b"4" * 5000)
        raise ConnectionError

    with cache.hold({"it": entry(b"4" * 6000)}, "it"), pytest.raises(ConnectionError):
        obtain(cache, b"4" * 6000, break_off)
    assert [path.exists() for path in paths] == [False] * 3 and size(tmp_path) == 5000 + 3000, "partial files count"
    keep(cache, b"5" * 9000)
    assert size(tmp_path) == 9000


def test_held_files_stay_and_more_than_the_bound_is_refused(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path, 10 * KIB), Cache(tmp_path, 10 * KIB)
    first, second = b"1" * 6000, b"2" * 6000
    with cache.hold({"it": entry(first)}, "first"):
        path = obtain(cache, first, filling(first))
        refused = pytest.raises(BundleError, match=r"second: .* of which other pulls need 6000")
        with refused, other.hold({"it": entry(second)}, "second"):
            pass
        assert path.exists()
        with other.hold({"it": entry(first)}, "the same"):
            assert obtain(other, first, nothing) == path
    keep(other, second)
    assert not path.exists()
    files = {"a": entry(b"a" * 5120), "b": entry(b"b" * 5121)}
    refused = pytest.raises(BundleError, match=rf"large: has 10241 bytes, and the cache in {tmp_path} may hold 10240")
    with refused, cache.hold(files, "large"):
        pass
    with cache.hold({"a": entry(b"a" * 10240), "b": entry(b"a" * 10240)}, "a file twice counts once"):
        pass


def test_second_place_is_the_same_file_or_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = keep(Cache(tmp_path / "cache"), b"weights")
    put(source, tmp_path / "a/b/linked")
    assert (tmp_path / "a/b/linked").samefile(source)

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    put(source, tmp_path / "copied")
    assert not (tmp_path / "copied").samefile(source) and (tmp_path / "copied").read_bytes() == b"weights"
