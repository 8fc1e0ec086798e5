"""Mirrors: a folder follows a store, and no failure of the store or of one version takes away what is there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.signing import Keys, sign
from dragoman.model.files import replaced
from dragoman.server.stores import cache
from dragoman.server.stores import mirror as mirrors
from dragoman.server.stores import pull as model_files
from dragoman.server.stores.address import Address
from dragoman.server.stores.mirror import Mirror, sync
from dragoman.server.stores.store import StoppedError
from tests.server.stores.conftest import BIG_FILE, S3, Registry, files
from tests.server.stores.proxy import Harm, Proxy

Orders = Callable[..., Any]
Make = Callable[..., Path]
ALL = "s3://models/all"


class Followed:
    """A folder that follows the S3 server's `all/`, which is filled with small bundles."""

    def __init__(self, s3: S3, make_bundle: Make, folder: Path, order: Orders) -> None:
        self.s3, self._make, self.folder, self.here, self.order = s3, make_bundle, folder, folder / "here", order
        self.mirror = self.open(ALL)

    def open(self, address: str, *choosing: Any, **given: Any) -> Mirror:
        return Mirror(Address.parse(address), self.here, self.order(**given), *choosing)

    def put(self, version: str, seed: int, *, damaged: bool = False) -> Path:
        model = version.partition("/")[0]
        source = self.folder / f"source-{model}-{seed}"
        bundle = source if source.exists() else self._make(source, model, seed, 1000)
        self.s3.put(bundle, f"all/{version}")
        if damaged:
            self.write(f"{version}/{BIG_FILE}", b"x" * 1000)
        return bundle

    def write(self, path: str, content: bytes) -> None:
        self.s3.client.put_object(Bucket="models", Key=f"all/{path}", Body=content)

    def delete(self, path: str) -> None:
        self.s3.remove(f"all/{path}")

    @property
    def versions(self) -> list[str]:
        return sorted(str(path.parent.relative_to(self.here)) for path in self.here.glob("[!.]*/*/bundle.json"))


@pytest.fixture
def followed(s3: S3, s3_proxy: Proxy, make_bundle: Make, tmp_path: Path, order: Orders) -> Followed:
    return Followed(s3, make_bundle, tmp_path, order)


def test_versions_come_and_go_as_they_do_in_the_store(
    followed: Followed, make_bundle: Make, s3_proxy: Proxy, order: Orders
) -> None:
    make_bundle(followed.here / "own", "own", 5, 1000)
    make_bundle(followed.here / "en-de/0", "en-de", 6, 1000)
    followed.put("en-de/1", 1)
    followed.put("fr-de/1", 2)
    first = followed.mirror.sync()
    assert followed.versions == ["en-de/0", "en-de/1", "fr-de/1"] and first.is_changed and not first.problems
    assert not followed.mirror.sync().is_changed and not sync(ALL, followed.here, order()).is_changed
    assert len(s3_proxy.asked(BIG_FILE)) == 2, "also a server that starts again reads nothing again"
    followed.put("en-de/2", 3)
    followed.delete("fr-de/")
    followed.delete("en-de/1/")
    second = followed.mirror.sync()
    assert followed.versions == ["en-de/0", "en-de/2"] and (followed.here / "own/bundle.json").exists()
    assert [each.placed.directory for each in second.added] == [followed.here / "en-de/2"]
    assert sorted(second.removed) == [followed.here / "en-de/1", followed.here / "fr-de/1"]
    assert not (followed.here / "fr-de").exists()
    followed.put("en-de/2", 4)
    assert "en-de/2: is another bundle, and versions do not change" in followed.mirror.sync().problems["en-de/2"]
    followed.delete("")
    assert followed.mirror.sync().reason == f"{ALL}: holds no bundle" and followed.versions == ["en-de/0", "en-de/2"]


def test_tag_that_is_moved_replaces_the_bundle(
    registry: type[Registry], make_bundle: Make, followed: Followed, logged: Any
) -> None:
    mirror = followed.open(f"oci://127.0.0.1:{registry.port}/mirrored:stable")
    old, new = (make_bundle(followed.folder / f"source{seed}", seed=seed, size=1000) for seed in (1, 2))
    for number, bundle in enumerate((old, new, old), 1):
        digest = registry.push(bundle, "mirrored:stable")
        changed = mirror.sync()
        assert followed.versions == [f"tiny/{number}"] and files(followed.here / f"tiny/{number}") == files(bundle)
        assert changed.removed == [followed.here / f"tiny/{number - 1}"] * (number > 1)
        assert [line["is_now"] for line in logged() if "is_now" in line][-1].endswith(f"/mirrored@{digest}")


def test_outage_changes_nothing_and_is_logged_once(followed: Followed, s3_proxy: Proxy, logged: Any) -> None:
    followed.put("en-de/1", 1)
    mirror = followed.open(ALL)
    mirror.sync()
    s3_proxy.harms.append(Harm("", 0, "cut", times=1000))
    for _ in range(2):
        found = mirror.sync()
        assert found.reason.startswith(f"{ALL}: ") and not found.is_changed
    assert followed.versions == ["en-de/1"]
    assert [line["event"] for line in logged() if line["level"] == "warning"] == ["the store cannot be read; what is here stays"]
    s3_proxy.harms.clear()
    for _ in range(2):
        assert not mirror.sync().reason
    assert [line["event"] for line in logged()][2:] == ["the store is read again, without problems"]


def test_bad_version_is_reported_once_and_harms_no_other(
    followed: Followed, s3_proxy: Proxy, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.put("en-de/1", 1)
    followed.put("en-de/2", 2, damaged=True)
    mirror = followed.open(ALL)
    for _ in range(3):
        assert "SHA-256" in mirror.sync().problems["en-de/2"]
    assert followed.versions == ["en-de/1"]
    assert [line["folder"] for line in logged() if line["level"] == "warning"] == ["en-de/2"]
    assert len(s3_proxy.asked(f"2/{BIG_FILE}")) == 2, "twice in the first round, and not in the others"
    with monkeypatch.context() as later:
        later.setattr(mirrors, "REFUSED_SECONDS", 0.0)
        mirror.sync()
    assert len(s3_proxy.asked(f"2/{BIG_FILE}")) == 4
    followed.put("en-de/2", 2)
    followed.delete(f"en-de/2/{BIG_FILE}")  # as while it is uploaded
    assert f"{BIG_FILE}: no such file" in mirror.sync().problems["en-de/2"]
    followed.put("en-de/2", 2)
    assert not mirror.sync().problems and followed.versions == ["en-de/1", "en-de/2"]


def test_no_good_version_goes_while_a_wanted_one_cannot_be_had(followed: Followed) -> None:
    asked: list[object] = []

    def newest(model: str, names: Any) -> list[str]:
        asked.append((model, list(names)))
        return names[-2:]

    mirror = followed.open(ALL, newest)
    for version, seed in (("en-de/9", 9), ("en-de/10", 10), ("en-de/11", 11), ("fr-de/1", 4)):
        followed.put(version, seed)
    mirror.sync()
    assert followed.versions == ["en-de/10", "en-de/11", "fr-de/1"] and asked[0] == ("en-de", ["9", "10", "11"])
    for number in (12, 13):
        followed.put(f"en-de/{number}", number, damaged=True)
    followed.delete("fr-de/")
    followed.put("da-de/1", 5)
    found = mirror.sync()
    assert list(found.problems) == ["en-de/12", "en-de/13"] and found.removed == [followed.here / "fr-de/1"]
    assert followed.versions == ["da-de/1", "en-de/10", "en-de/11"]
    followed.put("en-de/12", 12)
    followed.put("en-de/13", 13)
    assert not mirror.sync().problems and followed.versions == ["da-de/1", "en-de/12", "en-de/13"]


def test_one_bundle_is_replaced_only_by_a_good_one_that_is_not_ambiguous(followed: Followed, make_bundle: Make) -> None:
    sources = [make_bundle(followed.folder / f"one{seed}", "tiny", seed, 1000) for seed in (1, 2)]
    followed.s3.put(sources[0], "all")
    followed.mirror.sync()
    followed.s3.put(sources[1], "all")
    followed.write(BIG_FILE, b"x")
    found = followed.mirror.sync()
    assert found.problems and not found.removed and followed.versions == ["tiny/1"]
    followed.write("bundle.json", b"<html>")  # as web servers answer for what they do not have
    found = followed.mirror.sync()
    assert "bundle.json: not a bundle's manifest" in found.problems[""] and not found.removed
    followed.put("en-de/1", 1)
    assert followed.mirror.sync().reason.startswith(f"{ALL}: holds bundle.json beside folders of bundles")
    assert followed.versions == ["tiny/1"]
    followed.delete("en-de/")
    followed.s3.put(sources[1], "all")
    assert followed.mirror.sync().removed == [followed.here / "tiny/1"] and followed.versions == ["tiny/2"]


def test_used_versions_stay_while_the_store_has_their_place(followed: Followed, make_bundle: Make) -> None:
    served = {followed.here / "tiny/1", followed.here / "en-de/1"}
    mirror = followed.open(ALL, lambda _, names: names[-1:], served.__contains__)
    for number in (1, 2):
        followed.s3.put(make_bundle(followed.folder / f"tiny-{number}", "tiny", number, 1000), "all/flat")
        followed.put(f"en-de/{number}", number)
        found = mirror.sync()
    assert not found.removed and followed.versions == ["en-de/1", "en-de/2", "tiny/1", "tiny/2"]
    served.clear()
    assert sorted(mirror.sync().removed) == [followed.here / "en-de/1", followed.here / "tiny/1"]
    served.add(followed.here / "en-de/2")
    followed.delete("en-de/")
    assert mirror.sync().removed == [followed.here / "en-de/2"]


def test_model_file_follows_the_store_unless_it_was_written_here(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    here = followed.here / "en-de/model.toml"
    followed.put("en-de/1", 1)
    for text in ("# one\n", "# two\n"):
        followed.write("en-de/model.toml", text.encode())
        assert not followed.mirror.sync().problems and here.read_text() == text

    def dying(path: Path) -> Any:
        if path.name == "model.toml":
            raise KeyboardInterrupt
        return replaced(path)

    followed.write("en-de/model.toml", b"# three\n")
    with monkeypatch.context() as dead, pytest.raises(KeyboardInterrupt):
        dead.setattr(model_files, "replaced", dying)
        followed.mirror.sync()
    assert here.read_text() == "# two\n"
    assert not followed.mirror.sync().problems and here.read_text() == "# three\n", "it is still known as pulled"
    followed.delete("en-de/model.toml")
    followed.mirror.sync()
    assert not here.exists()
    followed.write("en-de/model.toml", b"# four\n")
    followed.mirror.sync()
    here.write_text("# own\n")
    followed.write("en-de/model.toml", b"# five\n")
    assert "was written here, and stays" in followed.mirror.sync().problems["en-de/model.toml"]
    followed.delete("en-de/model.toml")
    followed.mirror.sync()
    assert here.read_text() == "# own\n"


def test_signatures_are_required_of_bundles_and_model_files(followed: Followed, keys: Keys, key: Path) -> None:
    mirror = followed.open(ALL, keys=keys)
    bundle = followed.put("en-de/1", 1)
    followed.write("en-de/model.toml", b"# one\n")
    assert "is not signed" in mirror.sync().problems["en-de/1"] and followed.versions == []
    sign(bundle / "bundle.json", key)
    followed.put("en-de/1", 1)
    assert list(mirror.sync().problems) == ["en-de/model.toml"]
    assert Bundle.open(followed.here / "en-de/1", keys=keys) and not (followed.here / "en-de/model.toml").exists()
    (followed.folder / "model.toml").write_text("# one\n")
    sign(followed.folder / "model.toml", key)
    followed.write("en-de/model.toml.sig", (followed.folder / "model.toml.sig").read_bytes())
    assert not mirror.sync().problems and (followed.here / "en-de/model.toml").exists()


def test_stop_and_a_full_disk_end_a_download(
    followed: Followed, s3_proxy: Proxy, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.s3.put(bundle, "all")
    stopped: list[bool] = []
    mirror = followed.open(ALL, is_stopped=lambda: bool(stopped))
    with monkeypatch.context() as full:
        full.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        assert mirror.sync().problems == {"": f"{followed.folder / 'cache'}: No space left on device"}
    assert not s3_proxy.asked(BIG_FILE), "it is not tried to fill the disk"
    s3_proxy.harms.append(Harm(BIG_FILE, 1_000_000, "cut"))
    s3_proxy.on_harm = lambda: stopped.append(True)
    with pytest.raises(StoppedError):
        mirror.sync()
    assert followed.versions == []
    stopped.clear()
    assert not mirror.sync().problems and followed.versions == ["tiny/1"]


def test_folder_is_mirrored_without_links_that_lead_back_and_unprintable_names(followed: Followed, make_bundle: Make) -> None:
    there = followed.folder / "there"
    make_bundle(there / "en-de/1", "en-de", 1, 1000)
    (there / "en-de/here").symlink_to(".")
    (there / "all").symlink_to(there)
    mirror = followed.open(str(there))
    assert not mirror.sync().reason and followed.versions == ["en-de/1"]
    make_bundle(there / "en-de/2", "en-de", 2, 1000)
    shutil.rmtree(there / "en-de/1")
    for number, name in enumerate(("a\nb", "a\x1b[31m", "a\udcff")):
        make_bundle(there / name, "one", 3 + number, 1000)
    problems = mirror.sync().problems
    assert len(problems) == 3 and all(reason.isprintable() for reason in problems.values())
    assert all(reason.endswith(": no folder of bundles is called so") for reason in problems.values())
    assert followed.versions == ["en-de/2"]
    with pytest.raises(BundleError, match=r"an archive does not change"):
        followed.open("https://models.example/all.tar")
