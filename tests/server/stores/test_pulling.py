"""Pulls: one contract for every kind of store, interruptions, checksums, signatures, and everything that is refused."""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import Bundle, BundleError, FileEntry, hash_file
from dragoman.export.signing import Keys, sign
from dragoman.model.errors import InputError
from dragoman.server.models.model_file import natural_key
from dragoman.server.stores.cache import Cache, Download
from dragoman.server.stores.store import FolderStore, Found, StoreError, find
from tests.server.stores.conftest import BIG_BYTES, BIG_FILE, S3, Registry, bring, digest, files, seen
from tests.server.stores.proxy import Harm, Proxy, proxy_to

Orders = Callable[..., Any]
Make = Callable[..., Path]


@dataclass
class Shop:
    """A bundle in a store behind a proxy."""

    address: str
    proxy: Proxy
    big: str = BIG_FILE
    told: list[str] = field(default_factory=list)


@pytest.fixture(params=["s3", "registry", "web"])
def shop(request: pytest.FixtureRequest, bundle: Path) -> Iterator[Shop]:
    if request.param == "registry":
        registry: type[Registry] = request.getfixturevalue("registry")
        pushed = registry.push(bundle, "shop:1")
        with proxy_to(registry.port) as proxy:
            named = f"oci://127.0.0.1:{proxy.port}/shop"
            yield Shop(f"{named}:1", proxy, hash_file(bundle / BIG_FILE), [f"{named}@{pushed}"])
    elif request.param == "web":
        shutil.copytree(bundle, request.getfixturevalue("web_folder") / "a b" / "tiny")
        with proxy_to(request.getfixturevalue("web")) as proxy:
            yield Shop(f"http://127.0.0.1:{proxy.port}/a%20b/tiny", proxy)
    else:
        request.getfixturevalue("s3").put(bundle, "team a/m")
        yield Shop("s3://models/team a/m", request.getfixturevalue("s3_proxy"))


def starts(shop: Shop) -> list[int]:
    """Return the offsets from which the large file was asked for."""
    found = (re.search(r"range: bytes=(\d+)-", head) for head in shop.proxy.asked(shop.big))
    return [int(each[1]) if each else 0 for each in found]


CUTS = [("cut", 2_000_000, 1), ("cut", 0, 1000)]
WRONG_SUM = rf"{BIG_FILE}: SHA-256 [0-9a-f]+, but it should be "


@pytest.mark.parametrize(
    ("harms", "error", "min_start"),
    [
        ([], None, 0),
        ([("cut", 1_000_000, 1), ("cut", 700_000, 1)], None, 0),
        ([("cut", 1_000_000, 1), ("flip", 12345, 1)], None, 0),
        ([("flip", 12345, 1000)], WRONG_SUM, 0),
        ([("stall", 100_000, 1000)], rf"{BIG_FILE}: silent for 1 seconds", 0),
        (CUTS, BIG_FILE, 1_900_000),
    ],
    ids=["intact", "cut", "flipped once", "flipped", "silent", "ended"],
)
def test_bundle_comes_as_it_is_in_the_store_or_not_at_all(
    shop: Shop, bundle: Path, tmp_path: Path, order: Orders, harms: list[tuple[str, int, int]], error: str | None, min_start: int
) -> None:
    """A failed pull leaves nothing that a server sees, and the next one goes on from what came."""
    here, told = tmp_path / "here", list[str]()
    shop.proxy.harms += [Harm(shop.big, at, what, times) for what, at, times in harms]
    shown: list[list[str]] = []
    shop.proxy.on_harm = lambda: shown.append([path.name for path in here.glob("[!.]*")])
    with nullcontext() if error is None else pytest.raises((StoreError, BundleError), match=error):
        assert bring(shop.address, here, order(on_address=told.append, silence_seconds=1)) == ["tiny/1"]
    assert all(names == [] for names in shown) and bool(shown) == bool(harms)
    offsets = starts(shop)
    assert offsets[0] == 0 and len(offsets) <= 15
    if error is not None:
        assert seen(here) == [] and not list((tmp_path / "cache/objects").glob(f"*/{hash_file(bundle / BIG_FILE)}"))
        shop.proxy.harms.clear()
        shop.proxy.requests.clear()
        bring(shop.address, here, order())
        assert starts(shop)[0] >= min_start
    elif len(harms) == 2 and harms[1][0] == "cut":
        assert 0 < offsets[1] <= 1_000_000 and offsets[1] < offsets[2] <= offsets[1] + 700_000
    assert files(here / "tiny/1") == files(bundle) and seen(here) == ["tiny"] and told == shop.told
    assert Bundle.open(here / "tiny/1").digest == digest(bundle)
    num_asked = len(starts(shop))
    changed = (here / "tiny/1/bundle.json").stat().st_mtime_ns
    for folder, address in ((here, shop.address), (tmp_path / "elsewhere", (shop.told or [shop.address])[0])):
        assert bring(address, folder, order()) == ["tiny/1"]
    assert len(starts(shop)) == num_asked, "it is there, or in the cache"
    assert (here / "tiny/1/bundle.json").stat().st_mtime_ns == changed


def test_bundle_comes_from_google(google: S3, bundle: Path, tmp_path: Path, order: Orders) -> None:
    google.put(bundle, "team a/m")
    assert bring("gs://models/team a/m", tmp_path / "here", order()) == ["tiny/1"]
    assert files(tmp_path / "here/tiny/1") == files(bundle)
    with pytest.raises(BundleError, match="gs://models/team b/m: holds no bundle"):
        bring("gs://models/team b/m", tmp_path / "here", order())


def test_folder_of_models_comes_with_its_versions(
    s3: S3, web: int, web_folder: Path, make_bundle: Make, tmp_path: Path, order: Orders
) -> None:
    source = web_folder
    for number, version in enumerate(("1", "2", "10")):
        make_bundle(source / "en-de" / version, "en-de", number, 1000)
    make_bundle(source / "flat", "fr-de", 3, 1000)
    make_bundle(source / ".hidden", "hidden", 4, 1000)
    (source / "en-de" / "model.toml").write_text("versions = 'latest 1'\n")
    (source / "README").write_text("models\n")
    s3.put(source, "all")
    for number, address in enumerate(("s3://models/all", f"http://127.0.0.1:{web}", str(source))):
        here = tmp_path / str(number)
        assert bring(address, here, order()) == ["en-de/1", "en-de/2", "en-de/10", "fr-de/1"]
        assert files(here / "en-de") == files(source / "en-de") and files(here / "fr-de/1") == files(source / "flat")


@pytest.mark.parametrize(("ending", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tar.xz", "w:xz")])
def test_archive_is_unpacked_if_its_checksum_is_right(
    web: int, web_folder: Path, bundle: Path, tmp_path: Path, order: Orders, ending: str, mode: Any
) -> None:
    (bundle / BIG_FILE).write_bytes(b"x" * BIG_BYTES)
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["files"][BIG_FILE]["sha256"] = hash_file(bundle / BIG_FILE)
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    path, here, address = web_folder / f"models.{ending}", tmp_path / "here", f"http://127.0.0.1:{web}/models.{ending}"
    with tarfile.open(path, mode) as archive:
        archive.add(bundle, "en-de")
    right = hash_file(path)
    with pytest.raises(InputError, match=r"--sha256"):
        bring(address, here, order())
    with pytest.raises(BundleError, match=rf"models.{ending}: SHA-256 {right}, but it should be {'0' * 64}"):
        bring(address, here, order(sha256="0" * 64))
    assert seen(here) == [] and bring(address, here, order(sha256=right)) == ["tiny/1"]
    assert files(here / "tiny/1") == files(bundle) and seen(here) == ["tiny"]


# Once more, and by several.


def test_versions_do_not_change_and_damaged_ones_are_pulled_again(s3: S3, make_bundle: Make, tmp_path: Path, order: Orders) -> None:
    here = tmp_path / "here"
    sources = [make_bundle(tmp_path / f"source{seed}", seed=seed, size=1000) for seed in (1, 2)]
    for number, source in enumerate(sources):
        s3.put(source, "m")
        assert bring("s3://models/m", here, order()) == [f"tiny/{number + 1}"], "one without a version gets the next number"
    s3.put(sources[0], "all/tiny/7")
    bring("s3://models/all", here, order())
    (here / "tiny/7/encoder.weights").unlink()
    (here / "tiny/7/encoder.weights").write_bytes(b"")
    assert bring("s3://models/all", here, order()) == ["tiny/7"] and files(here / "tiny/7") == files(sources[0])
    s3.put(sources[1], "all/tiny/7")
    with pytest.raises(BundleError, match=r"tiny/7: is another bundle, and versions do not change"):
        bring("s3://models/all", here, order())
    assert files(here / "tiny/7") == files(sources[0]) and seen(here) == ["tiny"]


def test_simultaneous_pulls_read_each_file_once_and_do_not_disturb_each_other(
    s3: S3, s3_proxy: Proxy, bundle: Path, make_bundle: Make, tmp_path: Path, order: Orders
) -> None:
    s3.put(bundle, "m")
    for number in range(2):
        make_bundle(tmp_path / f"models/m{number}/1", f"m{number}", number, 1000)
        (tmp_path / f"models/m{number}/model.toml").write_text(f"# {number}\n")
    with ThreadPoolExecutor(6) as pool:
        pulls = [pool.submit(bring, "s3://models/m", tmp_path / "here", order()) for _ in range(4)]
        assert [pull.result() for pull in pulls] == [["tiny/1"]] * 4
        assert len(s3_proxy.asked(BIG_FILE)) == 1 and files(tmp_path / "here/tiny/1") == files(bundle)
        for attempt in range(4):
            pulls = [pool.submit(bring, str(tmp_path / "models"), tmp_path / f"here{attempt}", order()) for _ in range(6)]
            assert [pull.result() for pull in pulls] == [["m0/1", "m1/1"]] * 6


# Refused configurations.


def test_missing_or_changed_files_are_named(s3: S3, bundle: Path, tmp_path: Path, order: Orders) -> None:
    s3.put(bundle, "m")
    for body, reason in (
        (None, rf"s3://models/m/{BIG_FILE}: no such file"),
        (b"x" * (BIG_BYTES - 1), rf"s3://models/m/{BIG_FILE}: {BIG_BYTES - 1} bytes, but there should be {BIG_BYTES}"),
        (b"x" * (BIG_BYTES + 1), rf"s3://models/m/{BIG_FILE}: more than the {BIG_BYTES} bytes"),
    ):
        s3.client.delete_object(Bucket="models", Key=f"m/{BIG_FILE}")
        if body is not None:
            s3.client.put_object(Bucket="models", Key=f"m/{BIG_FILE}", Body=body)
        with pytest.raises((StoreError, BundleError), match=reason):
            bring("s3://models/m", tmp_path / "here", order())


def test_addresses_without_bundles_are_named_in_one_line(
    s3: S3, web: int, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    for address in ("s3://models/m", str(tmp_path / "empty"), f"http://127.0.0.1:{web}"):
        with pytest.raises(BundleError, match=rf"{re.escape(address)}: holds no bundle"):
            bring(address, tmp_path / "here", order())
    for address in ("s3://nobody/m", str(tmp_path / "nowhere"), f"http://127.0.0.1:{web}/no"):
        with pytest.raises((StoreError, BundleError), match=rf"\A{re.escape(address)}[^\n]*\Z"):
            bring(address, tmp_path / "here", order())
    with pytest.raises(StoreError, match=r"^/there-is-no-such\.tar: no such file"):
        bring("/there-is-no-such.tar", tmp_path / "here", order(sha256="0" * 64))
    with pytest.raises(InputError, match=r"http://models\.example/m: without TLS, what comes must be signed"):
        bring("http://models.example/m", tmp_path / "here", order())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for address in ("s3://models/m", "oci://127.0.0.1:9/m:1", "http://127.0.0.1:9/m"):
        with pytest.raises(StoreError, match=rf"\A{address}[^\n]*\Z"):
            bring(address, tmp_path / "here", order())


def test_checksum_and_signature_are_checked_before_anything_else_is_read(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders, keys: Keys, key: Path
) -> None:
    here = tmp_path / "here"

    def refuse(reason: str, **given: Any) -> None:
        with pytest.raises(BundleError, match=rf"s3://models/m{reason}"):
            bring("s3://models/m", here, order(**given))

    s3.put(bundle, "m")
    refuse(rf"/bundle.json: SHA-256 {digest(bundle)}, but {'0' * 64} is asked for", sha256="0" * 64)
    refuse(": is not signed", keys=keys)
    small = Cache(tmp_path / "small", BIG_BYTES / 2**30)
    refuse(rf": has \d+ bytes, and the cache in {tmp_path / 'small'} may hold {BIG_BYTES}", cache=small)
    assert not s3_proxy.asked(BIG_FILE) and not s3_proxy.asked("encoder.onnx")
    assert bring("s3://models/m", here, order(sha256=digest(bundle))) == ["tiny/1"]
    sign(bundle / "bundle.json", key)
    s3.put(bundle, "m")
    assert bring("s3://models/m", here, order(keys=keys)) == ["tiny/1"]
    Bundle.open(here / "tiny/1", keys=keys)  # the signature came later
    s3_proxy.requests.clear()
    (bundle / "bundle.json").write_text((bundle / "bundle.json").read_text().replace('"tiny"', '"tina"'))
    s3.put(bundle, "m")
    refuse(r"/bundle.json: is not what key [0-9a-f]{64} signed", keys=keys)
    assert not s3_proxy.asked(BIG_FILE) and not s3_proxy.asked("encoder.onnx")
    sign(bundle / "bundle.json", key)
    s3.put(bundle, "m")
    assert bring("s3://models/m", here, order(keys=keys)) == ["tina/1"]


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/outside", "tokenizer/../../outside", "a\\..\\b", ".pulled.json", "bundle.json.sig", "bundle.json"]
)
def test_files_that_lead_elsewhere_are_refused(bundle: Path, tmp_path: Path, order: Orders, path: str) -> None:
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["files"][path] = manifest["files"][BIG_FILE]
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"bundle\.json: "):
        bring(str(bundle), tmp_path / "here", order())
    assert seen(tmp_path / "here") == [] and not (tmp_path / "outside").exists()


def test_folders_give_nothing_from_outside_and_no_other_model(bundle: Path, tmp_path: Path, order: Orders) -> None:
    shutil.copytree(bundle, tmp_path / "models/fr-de/1")
    with pytest.raises(BundleError, match=r"fr-de/1/bundle\.json: is of model tiny, but lies in the folder of fr-de"):
        bring(str(tmp_path / "models"), tmp_path / "here", order())
    assert bring(str(bundle), tmp_path / "here", order()) == ["tiny/1"] and not (tmp_path / "cache").exists()
    shutil.move(bundle / BIG_FILE, tmp_path / "secret")
    (bundle / BIG_FILE).symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match=rf"{BIG_FILE}: a link that leads out of the folder"):
        bring(str(bundle), tmp_path / "there", order())
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(PermissionError, match=str(tmp_path / "closed")):
            bring(str(bundle), tmp_path / "closed", order())


def member(name: str, size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", ""),
        (b"no tar at all" * 100, ""),
        (b"\x1f\x8b\x08\x00 broken", ""),
        (b"\xfd7zXZ\x00 broken", ""),
        (b"BZh9 broken", ""),
        (member("../../outside"), "cannot be unpacked"),
        (member("en-de/../../../outside"), "cannot be unpacked"),
        (member("hole", 1 << 45), "holds more than there is room for"),
    ],
)
def test_bad_archive_is_named(tmp_path: Path, order: Orders, content: bytes, reason: str) -> None:
    path = tmp_path / "none.tar.gz"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=rf"\A[^\n]*none\.tar\.gz: {reason}[^\n]*\Z"):
        bring(str(path), tmp_path / "a/b/here", order(sha256=hash_file(path)))
    assert not list(tmp_path.rglob("outside")) and seen(tmp_path / "a/b/here") == []


class FullAt(io.BytesIO):
    """A file on a disk that is full after so many bytes."""

    name = "partial/abc"

    def write(self, piece: Any) -> int:
        if (room := 700 - self.tell()) <= 0:
            raise OSError(28, "No space left on device")
        return super().write(piece[:room])


def test_full_disk_is_given_its_room_back(tmp_path: Path) -> None:
    content, file = b"x" * 1000, FullAt()
    (tmp_path / "file").write_bytes(content)
    entry = FileEntry(len(content), hashlib.sha256(content).hexdigest())
    with pytest.raises(OSError, match=r"No space left on device: 'partial/abc'"):
        Download(FolderStore(tmp_path), "file", entry, lambda *_: None, lambda: False).fill(file)
    assert file.getvalue() == b""


def test_versions_in_a_store_have_the_order_in_which_they_are_served() -> None:
    names = ["2", "v1", "10", "1.2", "1.b", "2024-11-01", "v10", "1" * 5000]
    found = find([f"en-de/{name}/bundle.json" for name in names[:-1]], "s3://models")
    assert [each.version for each in found] == sorted(names[:-1], key=natural_key)
    assert {each.folder for each in find([f"{name}/bundle.json" for name in names], "s3://models")} == set(names)
    for version in ("1+2", "x" * 65, "-1"):
        with pytest.raises(BundleError, match=r"s3://models/m: .* is no name of a version"):
            Found(f"m/{version}", "m", version).check("s3://models/m")
