"""A folder kept as a store is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.signing import Keys, sign
from dragoman.model.files import replaced
from dragoman.server.stores import cache, model_files
from dragoman.server.stores import mirror as mirrors
from dragoman.server.stores.address import Address
from dragoman.server.stores.mirror import Mirror, sync
from dragoman.server.stores.pulling import Order
from dragoman.server.stores.store import StoppedError
from tests.server.stores.conftest import BIG_FILE, S3, Registry, files
from tests.server.stores.proxy import Harm, Proxy

Orders = Callable[..., Order]
Logged = Callable[[], list[dict[str, Any]]]
Make = Callable[..., Path]


def versions(folder: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(folder)) for path in folder.glob("[!.]*/*/bundle.json"))


@pytest.fixture
def models(s3: S3, make_bundle: Make, tmp_path: Path) -> Callable[[str, int], Path]:
    """Put a small bundle of a model's version into the S3 server."""

    def put(version: str, seed: int) -> Path:
        name = version.partition("/")[0]
        bundle = make_bundle(tmp_path / f"source-{name}-{seed}", name, seed, 1000)
        s3.put(bundle, f"all/{version}")
        return bundle

    return put


def test_versions_come_and_go_as_they_do_in_the_store(s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders) -> None:
    here = tmp_path / "here"
    mirror = Mirror(Address.parse("s3://models/all"), here, order())
    models("en-de/1", 1)
    models("fr-de/1", 2)
    first = mirror.sync()
    assert versions(here) == ["en-de/1", "fr-de/1"] and first.is_changed and not first.problems
    assert not mirror.sync().is_changed
    models("en-de/2", 3)
    s3.remove("all/fr-de/")
    second = mirror.sync()
    assert versions(here) == ["en-de/1", "en-de/2"]
    assert [str(each.placed.directory) for each in second.added] == [str(here / "en-de/2")]
    assert second.removed == [here / "fr-de/1"] and not (here / "fr-de").exists()


def test_what_somebody_else_put_there_stays(
    s3: S3, models: Callable[..., Path], make_bundle: Make, tmp_path: Path, order: Orders
) -> None:
    here = tmp_path / "here"
    make_bundle(here / "own", "own", 5, 1000)
    make_bundle(here / "en-de/0", "en-de", 6, 1000)
    models("en-de/1", 1)
    mirror = Mirror(Address.parse("s3://models/all"), here, order())
    mirror.sync()
    models("en-de/2", 2)
    s3.remove("all/en-de/1/")
    mirror.sync()
    assert versions(here) == ["en-de/0", "en-de/2"] and (here / "own/bundle.json").exists()


def test_another_bundle_at_one_address_takes_the_place_of_the_one_before(
    registry: Registry, make_bundle: Make, tmp_path: Path, order: Orders, logged: Logged
) -> None:
    here = tmp_path / "here"
    mirror = Mirror(Address.parse(f"oci://127.0.0.1:{registry.port}/mirrored:stable"), here, order())
    old, new = (make_bundle(tmp_path / f"source{seed}", seed=seed, size=1000) for seed in (1, 2))
    registry.push(old, "mirrored:stable")
    mirror.sync()
    digest = registry.push(new, "mirrored:stable")
    changed = mirror.sync()
    assert versions(here) == ["tiny/2"] and changed.removed == [here / "tiny/1"]
    assert files(here / "tiny/2") == files(new)
    assert [line["is_now"] for line in logged() if "is_now" in line][-1] == f"oci://127.0.0.1:{registry.port}/mirrored@{digest}"
    registry.push(old, "mirrored:stable")
    mirror.sync()
    assert versions(here) == ["tiny/3"] and files(here / "tiny/3") == files(old)


def test_a_server_that_starts_again_reads_nothing_again(
    s3: S3, s3_proxy: Proxy, models: Callable[..., Path], tmp_path: Path, order: Orders
) -> None:
    models("en-de/1", 1)
    sync("s3://models/all", tmp_path / "here", order())
    assert not sync("s3://models/all", tmp_path / "here", order()).is_changed
    assert len(s3_proxy.asked(BIG_FILE)) == 1


def test_while_the_store_is_away_nothing_changes_and_one_line_says_so(
    s3: S3, s3_proxy: Proxy, models: Callable[..., Path], tmp_path: Path, order: Orders, logged: Logged
) -> None:
    here = tmp_path / "here"
    models("en-de/1", 1)
    mirror = Mirror(Address.parse("s3://models/all"), here, order())
    mirror.sync()
    s3_proxy.harms.append(Harm("", 0, "cut", times=1000))
    for _ in range(3):
        found = mirror.sync()
        assert found.reason.startswith("s3://models/all: ") and not found.is_changed
    assert versions(here) == ["en-de/1"]
    assert [line["event"] for line in logged() if line["level"] == "warning"] == ["the store cannot be read; what is here stays"]
    s3_proxy.harms.clear()
    for _ in range(2):
        assert not mirror.sync().reason
    assert [line["event"] for line in logged()][2:] == ["the store is read again, without problems"]


def test_an_empty_store_takes_nothing_away(s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders) -> None:
    models("en-de/1", 1)
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order())
    mirror.sync()
    s3.remove("all/")
    assert mirror.sync().reason == "s3://models/all: holds no bundle"
    assert versions(tmp_path / "here") == ["en-de/1"]


def test_a_bad_version_is_said_once_and_hurts_no_other(
    s3: S3,
    s3_proxy: Proxy,
    models: Callable[..., Path],
    tmp_path: Path,
    order: Orders,
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tmp_path / "here"
    models("en-de/1", 1)
    good = models("en-de/2", 2)
    s3.client.put_object(Bucket="models", Key=f"all/en-de/2/{BIG_FILE}", Body=b"x" * 1000)
    mirror = Mirror(Address.parse("s3://models/all"), here, order())
    for _ in range(3):
        assert "SHA-256" in mirror.sync().problems["en-de/2"]
    assert versions(here) == ["en-de/1"]
    assert [line["folder"] for line in logged() if line["level"] == "warning"] == ["en-de/2"]
    readings = len(s3_proxy.asked(f"2/{BIG_FILE}"))
    assert readings == 2  # twice in the first round, and not in each of the others
    monkeypatch.setattr(mirrors, "REFUSED_SECONDS", 0.0)
    mirror.sync()
    assert len(s3_proxy.asked(f"2/{BIG_FILE}")) == 2 * readings
    monkeypatch.undo()
    s3.put(good, "all/en-de/2")
    mirror.sync()
    assert versions(here) == ["en-de/1", "en-de/2"]


def test_a_version_still_being_uploaded_comes_when_it_is_whole(
    s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders
) -> None:
    good = models("en-de/1", 1)
    s3.client.delete_object(Bucket="models", Key="all/en-de/1/encoder.onnx")
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order())
    assert "encoder.onnx: no such file" in mirror.sync().problems["en-de/1"]
    s3.put(good, "all/en-de/1")
    assert not mirror.sync().problems and versions(tmp_path / "here") == ["en-de/1"]


def test_the_old_one_stays_while_the_new_one_cannot_be_had(s3: S3, make_bundle: Make, tmp_path: Path, order: Orders) -> None:
    mirror = Mirror(Address.parse("s3://models/one"), tmp_path / "here", order())
    for seed in (1, 2):
        s3.put(make_bundle(tmp_path / f"source{seed}", seed=seed, size=1000), "one")
        if seed == 2:
            s3.client.put_object(Bucket="models", Key=f"one/{BIG_FILE}", Body=b"x")
        found = mirror.sync()
    assert found.problems and not found.removed and versions(tmp_path / "here") == ["tiny/1"]


def test_a_version_that_changes_in_the_store_is_refused_by_name(
    s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders
) -> None:
    first = models("en-de/1", 1)
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order())
    mirror.sync()
    models("en-de/1", 2)
    assert "en-de/1: is another bundle, and versions do not change" in mirror.sync().problems["en-de/1"]
    assert files(tmp_path / "here/en-de/1") == files(first)


def test_only_the_versions_that_are_wanted_come(s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders) -> None:
    for seed in (9, 10, 11):
        models(f"en-de/{seed}", seed)
    asked: list[object] = []

    def newest(model: str, names: Any) -> list[str]:
        asked.append((model, list(names)))
        return names[-1:]

    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order(), newest)
    mirror.sync()
    assert versions(tmp_path / "here") == ["en-de/11"] and asked == [("en-de", ["9", "10", "11"])]
    models("en-de/12", 12)
    mirror.sync()
    assert versions(tmp_path / "here") == ["en-de/12"]


def test_a_models_file_comes_changes_and_goes(s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders) -> None:
    here = tmp_path / "here/en-de/model.toml"
    models("en-de/1", 1)
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order())
    for text in ("versions = 'latest 1'\n", "versions = 'latest 2'\n"):
        s3.client.put_object(Bucket="models", Key="all/en-de/model.toml", Body=text.encode())
        assert not mirror.sync().problems
        assert here.read_text() == text
    s3.client.delete_object(Bucket="models", Key="all/en-de/model.toml")
    mirror.sync()
    assert not here.exists()


def test_a_models_file_that_was_written_here_stays(s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders) -> None:
    models("en-de/1", 1)
    s3.client.put_object(Bucket="models", Key="all/en-de/model.toml", Body=b"versions = 'latest 1'\n")
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order())
    mirror.sync()
    here = tmp_path / "here/en-de/model.toml"
    here.write_text("versions = 'latest 3'\n")
    s3.client.put_object(Bucket="models", Key="all/en-de/model.toml", Body=b"versions = 'latest 2'\n")
    assert "was written here, and stays" in mirror.sync().problems["en-de/model.toml"]
    s3.client.delete_object(Bucket="models", Key="all/en-de/model.toml")
    mirror.sync()
    assert here.read_text() == "versions = 'latest 3'\n"


def test_signatures_are_asked_of_everything_that_decides(
    s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders, keys: Keys, key: Path
) -> None:
    here = tmp_path / "here"
    mirror = Mirror(Address.parse("s3://models/all"), here, order(keys=keys))
    bundle = models("en-de/1", 1)
    s3.client.put_object(Bucket="models", Key="all/en-de/model.toml", Body=b"versions = 'latest 1'\n")
    assert "is not signed" in mirror.sync().problems["en-de/1"] and versions(here) == []
    sign(bundle / "bundle.json", key)
    s3.put(bundle, "all/en-de/1")
    assert list(mirror.sync().problems) == ["en-de/model.toml"]
    assert Bundle.open(here / "en-de/1", keys=keys) and not (here / "en-de/model.toml").exists()
    (tmp_path / "model.toml").write_text("versions = 'latest 1'\n")
    sign(tmp_path / "model.toml", key)
    s3.client.put_object(Bucket="models", Key="all/en-de/model.toml.sig", Body=(tmp_path / "model.toml.sig").read_bytes())
    assert not mirror.sync().problems and (here / "en-de/model.toml").exists()


def test_a_server_that_ends_does_not_wait_for_a_download(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders
) -> None:
    s3.put(bundle, "one")
    stopped: list[bool] = []
    s3_proxy.harms.append(Harm(BIG_FILE, 1_000_000, "cut"))
    s3_proxy.on_harm = lambda: stopped.append(True)
    mirror = Mirror(Address.parse("s3://models/one"), tmp_path / "here", order(is_stopped=lambda: bool(stopped)))
    with pytest.raises(StoppedError):
        mirror.sync()
    assert versions(tmp_path / "here") == []


def test_a_folder_is_mirrored_like_any_store(make_bundle: Make, tmp_path: Path, order: Orders) -> None:
    make_bundle(tmp_path / "there/en-de/1", "en-de", 1, 1000)
    mirror = Mirror(Address.parse(str(tmp_path / "there")), tmp_path / "here", order())
    mirror.sync()
    make_bundle(tmp_path / "there/en-de/2", "en-de", 2, 1000)
    shutil.rmtree(tmp_path / "there/en-de/1")
    mirror.sync()
    assert versions(tmp_path / "here") == ["en-de/2"]


def test_an_archive_is_not_for_that(tmp_path: Path, order: Orders) -> None:
    with pytest.raises(BundleError, match=r"an archive does not change"):
        Mirror(Address.parse("https://models.example/all.tar"), tmp_path, order())


def test_a_page_at_the_address_itself_takes_nothing_away(
    web: int, web_folder: Path, make_bundle: Make, tmp_path: Path, order: Orders
) -> None:
    """Some web servers give a page for whatever they do not have; it was taken for the one bundle that there is now."""
    make_bundle(web_folder / "en-de/1", "en-de", 1, 1000)
    mirror = Mirror(Address.parse(f"http://127.0.0.1:{web}"), tmp_path / "here", order())
    mirror.sync()
    (web_folder / "bundle.json").write_text("<html>")
    found = mirror.sync()
    assert "bundle.json: not a bundle's manifest" in found.problems[""]
    assert not found.removed and versions(tmp_path / "here") == ["en-de/1"]


def test_a_bundle_beside_models_is_ambiguous_and_takes_nothing_away(
    s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders
) -> None:
    one = models("en-de/1", 1)
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order())
    mirror.sync()
    s3.put(one, "all")
    assert mirror.sync().reason.startswith("s3://models/all: holds bundle.json beside folders of bundles")
    assert versions(tmp_path / "here") == ["en-de/1"]


def test_two_bad_versions_take_no_good_one_away(s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders) -> None:
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order(), lambda model, names: names[-2:])
    models("en-de/1", 1)
    models("fr-de/1", 4)
    mirror.sync()
    for number in (2, 3):
        models(f"en-de/{number}", number)
        s3.client.put_object(Bucket="models", Key=f"all/en-de/{number}/{BIG_FILE}", Body=b"x")
    s3.remove("all/fr-de/")
    models("da-de/1", 5)
    found = mirror.sync()
    assert list(found.problems) == ["en-de/2", "en-de/3"]
    assert found.removed == [tmp_path / "here/fr-de/1"] and versions(tmp_path / "here") == ["da-de/1", "en-de/1"]


def test_what_is_served_stays_while_the_store_has_its_place(s3: S3, make_bundle: Make, tmp_path: Path, order: Orders) -> None:
    served = {tmp_path / "here/tiny/1", tmp_path / "here/en-de/1"}
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order(), lambda _, names: names[-1:], served.__contains__)
    for number in (1, 2):
        s3.put(make_bundle(tmp_path / f"tiny-{number}", "tiny", number, 1000), "all/flat")
        s3.put(make_bundle(tmp_path / f"en-de-{number}", "en-de", number, 1000), f"all/en-de/{number}")
        found = mirror.sync()
    assert not found.removed and versions(tmp_path / "here") == ["en-de/1", "en-de/2", "tiny/1", "tiny/2"]
    served.clear()
    assert sorted(mirror.sync().removed) == [tmp_path / "here/en-de/1", tmp_path / "here/tiny/1"]
    served.add(tmp_path / "here/en-de/2")
    s3.remove("all/en-de/")
    assert mirror.sync().removed == [tmp_path / "here/en-de/2"]


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\udcff"])
def test_a_folder_with_a_name_for_no_eyes_is_refused_in_one_line(
    make_bundle: Make, tmp_path: Path, order: Orders, name: str
) -> None:
    make_bundle(tmp_path / "models" / name, "one", 1, 1000)
    make_bundle(tmp_path / "models/two", "two", 2, 1000)
    found = Mirror(Address.parse(str(tmp_path / "models")), tmp_path / "here", order()).sync()
    (reason,) = found.problems.values()
    assert reason.isprintable() and reason.endswith(": no folder of bundles is called so")
    assert versions(tmp_path / "here") == ["two/1"]


def test_the_file_of_a_pull_that_died_is_still_known_as_pulled(
    s3: S3, models: Callable[..., Path], tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark was of the new file, and the file still the old one: it counted as written here for ever."""
    models("en-de/1", 1)
    mirror = Mirror(Address.parse("s3://models/all"), tmp_path / "here", order())
    s3.client.put_object(Bucket="models", Key="all/en-de/model.toml", Body=b"# one\n")
    mirror.sync()
    s3.client.put_object(Bucket="models", Key="all/en-de/model.toml", Body=b"# two\n")

    def dying(path: Path) -> Any:
        if path.name == "model.toml":
            raise KeyboardInterrupt
        return replaced(path)

    with monkeypatch.context() as dead, pytest.raises(KeyboardInterrupt):
        dead.setattr(model_files, "replaced", dying)
        mirror.sync()
    assert (tmp_path / "here/en-de/model.toml").read_text() == "# one\n"
    assert not mirror.sync().problems and (tmp_path / "here/en-de/model.toml").read_text() == "# two\n"


def test_a_disk_that_is_too_small_is_not_filled_at_every_look(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put(bundle, "one")
    mirror = Mirror(Address.parse("s3://models/one"), tmp_path / "here", order())
    with monkeypatch.context() as full:
        full.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
        assert mirror.sync().problems == {"": f"{tmp_path / 'cache'}: No space left on device"}
    assert not s3_proxy.asked(BIG_FILE)
    assert not mirror.sync().problems and versions(tmp_path / "here") == ["tiny/1"]


def test_a_link_that_leads_back_hides_no_model(make_bundle: Make, tmp_path: Path, order: Orders) -> None:
    make_bundle(tmp_path / "models/en-de/1", "en-de", 1, 1000)
    (tmp_path / "models/en-de/here").symlink_to(".")
    (tmp_path / "models/all").symlink_to(tmp_path / "models")
    assert not Mirror(Address.parse(str(tmp_path / "models")), tmp_path / "here", order()).sync().reason
    assert versions(tmp_path / "here") == ["en-de/1"]
