"""Pulls from every kind of store: what comes is what was kept there, and appears at once."""

import base64
import json
import os
import re
import shutil
import tarfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle, BundleError, hash_file
from dragoman.export.signing import Keys, sign
from dragoman.model.errors import InputError
from dragoman.server.stores.address import Address
from dragoman.server.stores.cache import Cache
from dragoman.server.stores.pulling import Order, pull
from dragoman.server.stores.store import StoreError
from tests.server.stores.conftest import BIG_BYTES, BIG_FILE, S3, Registry, digest, files, run_registry, run_web
from tests.server.stores.proxy import Harm, Proxy, proxy_to

Orders = Callable[..., Order]


def bring(address: str, folder: Path, order: Order) -> list[str]:
    return [str(each.placed.directory.relative_to(folder)) for each in pull(Address.parse(address), folder, order)]


def no_leftovers(folder: Path) -> bool:
    """Nothing but a lock lies where pulls are under way."""
    return {path.name for path in (folder / ".pulling").iterdir()} <= {"lock"}


# --- From everywhere.


def test_a_bundle_comes_from_s3_as_it_is_there(s3: S3, bundle: Path, tmp_path: Path, order: Orders) -> None:
    s3.put(bundle, "team a/en-de")
    assert bring("s3://models/team a/en-de", tmp_path / "here", order()) == ["tiny/1"]
    assert files(tmp_path / "here/tiny/1") == files(bundle)
    assert Bundle.open(tmp_path / "here/tiny/1").digest == digest(bundle)
    assert no_leftovers(tmp_path / "here")


def test_a_bundle_comes_from_google(google: S3, bundle: Path, tmp_path: Path, order: Orders) -> None:
    google.put(bundle, "team a/en-de")
    assert bring("gs://models/team a/en-de", tmp_path / "here", order()) == ["tiny/1"]
    assert files(tmp_path / "here/tiny/1") == files(bundle)
    with pytest.raises(BundleError, match="gs://models/team b/en-de: holds no bundle"):
        bring("gs://models/team b/en-de", tmp_path / "here", order())


def test_a_bundle_comes_from_azure(azure: Callable[[Path, str], None], bundle: Path, tmp_path: Path, order: Orders) -> None:
    azure(bundle, "team a/en-de")
    assert bring("az://models/team a/en-de", tmp_path / "here", order()) == ["tiny/1"]
    assert files(tmp_path / "here/tiny/1") == files(bundle)
    with pytest.raises(BundleError, match="az://models/team b/en-de: holds no bundle"):
        bring("az://models/team b/en-de", tmp_path / "here", order())


def test_a_folder_of_models_comes_with_its_versions(
    s3: S3, make_bundle: Callable[..., Path], tmp_path: Path, order: Orders
) -> None:
    source = tmp_path / "models"
    for number, version in enumerate(("1", "2", "10")):
        make_bundle(source / "en-de" / version, "en-de", number, 1000)
    make_bundle(source / "flat", "fr-de", 3, 1000)
    make_bundle(source / ".hidden", "hidden", 4, 1000)
    (source / "en-de" / "model.toml").write_text("versions = 'latest 1'\n")
    (source / "README").write_text("models\n")
    s3.put(source, "all")
    assert bring("s3://models/all", tmp_path / "here", order()) == ["en-de/1", "en-de/2", "en-de/10", "fr-de/1"]
    assert files(tmp_path / "here/en-de") == files(source / "en-de")
    assert files(tmp_path / "here/fr-de/1") == files(source / "flat")


def test_a_bundle_comes_from_a_registry_by_tag_and_by_digest(
    registry: Registry, bundle: Path, tmp_path: Path, order: Orders
) -> None:
    pushed = registry.push(bundle, "team/en-de:stable")
    named = f"oci://127.0.0.1:{registry.port}/team/en-de"
    told: list[str] = []
    assert bring(f"{named}:stable", tmp_path / "tag", order(on_address=told.append)) == ["tiny/1"]
    assert told == [f"{named}@{pushed}"]
    assert bring(told[0], tmp_path / "digest", order(on_address=told.append)) == ["tiny/1"]
    assert len(told) == 1
    assert files(tmp_path / "tag/tiny/1") == files(tmp_path / "digest/tiny/1") == files(bundle)


def test_a_registry_that_wants_a_password_gets_that_of_dockers_configuration(
    bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registry").mkdir()
    (tmp_path / "htpasswd").write_text("reader:$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n")
    # Of the password `secret`.
    passwords = f"auth: {{htpasswd: {{realm: models, path: {tmp_path / 'htpasswd'}}}}}\n"
    with run_registry(tmp_path / "registry", passwords) as registry:
        registry.password = "secret"
        registry.push(bundle, "en-de:1")
        address = f"oci://127.0.0.1:{registry.port}/en-de:1"
        with pytest.raises(StoreError, match=r"access denied"):
            bring(address, tmp_path / "here", order())
        (tmp_path / "docker").mkdir()
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        for password, outcome in (("wrong", pytest.raises(StoreError, match=r"access denied")), ("secret", nullcontext())):
            shown = base64.b64encode(f"reader:{password}".encode()).decode()
            configuration = {"auths": {f"127.0.0.1:{registry.port}": {"auth": shown}}}
            (tmp_path / "docker/config.json").write_text(json.dumps(configuration))
            with outcome:
                bring(address, tmp_path / "here", order())
    assert files(tmp_path / "here/tiny/1") == files(bundle)


def test_a_bundle_and_a_folder_of_models_come_from_a_web_server(
    web: int, web_folder: Path, bundle: Path, tmp_path: Path, order: Orders
) -> None:
    shutil.copytree(bundle, web_folder / "a b/tiny/3")
    assert bring(f"http://127.0.0.1:{web}/a%20b/tiny/3/", tmp_path / "one", order()) == ["tiny/1"]
    assert bring(f"http://127.0.0.1:{web}/a%20b", tmp_path / "all", order()) == ["tiny/3"]
    assert files(tmp_path / "one/tiny/1") == files(tmp_path / "all/tiny/3") == files(bundle)


def test_an_authority_of_our_own_is_believed_where_it_is_named(
    web_folder: Path, certificates: Path, bundle: Path, tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.certificates import make_certificates

    ours = make_certificates(tmp_path, {"server": "IP:127.0.0.1"})
    shutil.copytree(bundle, web_folder / "tiny")
    with run_web(web_folder, ours) as port:
        address = f"https://127.0.0.1:{port}/tiny"
        with pytest.raises(StoreError, match=re.escape(address)):
            bring(address, tmp_path / "here", order(silence_seconds=5))
        monkeypatch.setenv("SSL_CERT_FILE", str(ours / "ca.pem"))
        assert bring(address, tmp_path / "here", order()) == ["tiny/1"]


def test_a_folder_will_do(bundle: Path, tmp_path: Path, order: Orders) -> None:
    assert bring(str(bundle), tmp_path / "here", order()) == ["tiny/1"]
    assert files(tmp_path / "here/tiny/1") == files(bundle)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tar.xz"])
def test_an_archive_is_opened_if_its_checksum_is_right(
    web: int, web_folder: Path, bundle: Path, tmp_path: Path, order: Orders, ending: str
) -> None:
    name = f"models.{ending}"
    with tarfile.open(web_folder / name, "w:" + {"tar": "", "tar.gz": "gz", "tar.xz": "xz"}[ending]) as archive:
        archive.add(bundle, "en-de")
    right = hash_file(web_folder / name)
    address = f"http://127.0.0.1:{web}/{name}"
    with pytest.raises(InputError, match=r"--sha256"):
        bring(address, tmp_path / "here", order())
    with pytest.raises(BundleError, match=rf"{name}: SHA-256 {right}, but it should be {'0' * 64}"):
        bring(address, tmp_path / "here", order(sha256="0" * 64))
    assert not list((tmp_path / "here").glob("[!.]*"))
    assert bring(address, tmp_path / "here", order(sha256=right)) == ["tiny/1"]
    assert files(tmp_path / "here/tiny/1") == files(bundle)
    assert no_leftovers(tmp_path / "here")


def test_an_archive_may_lie_in_the_root_of_the_file_system(tmp_path: Path, order: Orders) -> None:
    with pytest.raises(StoreError, match=r"^/there-is-no-such\.tar: no such file"):
        bring("/there-is-no-such.tar", tmp_path / "here", order(sha256="0" * 64))


# --- Once more, and by several.


def test_what_is_there_is_not_read_again(s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders) -> None:
    s3.put(bundle, "m")
    assert bring("s3://models/m", tmp_path / "here", order()) == ["tiny/1"]
    before = (tmp_path / "here/tiny/1/bundle.json").stat()
    assert bring("s3://models/m", tmp_path / "here", order()) == ["tiny/1"]
    assert len(s3_proxy.asked(BIG_FILE)) == 1
    assert (tmp_path / "here/tiny/1/bundle.json").stat().st_mtime_ns == before.st_mtime_ns
    assert bring("s3://models/m", tmp_path / "elsewhere", order()) == ["tiny/1"]
    assert len(s3_proxy.asked(BIG_FILE)) == 1  # from the cache


def test_another_bundle_at_the_address_gets_the_next_number(
    s3: S3, make_bundle: Callable[..., Path], tmp_path: Path, order: Orders
) -> None:
    for seed in (1, 2):
        s3.put(make_bundle(tmp_path / f"source{seed}", seed=seed, size=1000), "m")
        assert bring("s3://models/m", tmp_path / "here", order()) == [f"tiny/{seed}"]


def test_a_damaged_version_is_pulled_again(s3: S3, bundle: Path, tmp_path: Path, order: Orders) -> None:
    s3.put(bundle, "all/tiny/7")
    bring("s3://models/all", tmp_path / "here", order())
    damaged = tmp_path / "here/tiny/7/encoder.weights"
    damaged.unlink()
    damaged.write_bytes(b"")
    assert bring("s3://models/all", tmp_path / "here", order()) == ["tiny/7"]
    assert files(tmp_path / "here/tiny/7") == files(bundle)


def test_a_version_that_is_another_bundle_here_is_refused(
    s3: S3, make_bundle: Callable[..., Path], tmp_path: Path, order: Orders
) -> None:
    here = make_bundle(tmp_path / "here/tiny/7", seed=1, size=1000)
    before = files(here)
    s3.put(make_bundle(tmp_path / "source", seed=2, size=1000), "all/tiny/7")
    with pytest.raises(BundleError, match=r"tiny/7: is another bundle, and versions do not change"):
        bring("s3://models/all", tmp_path / "here", order())
    assert files(here) == before
    assert no_leftovers(tmp_path / "here")


def test_pulls_at_the_same_time_read_each_file_once(s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders) -> None:
    s3.put(bundle, "m")
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(bring("s3://models/m", tmp_path / "here", order()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["tiny/1"]] * 4
    assert len(s3_proxy.asked(BIG_FILE)) == 1
    assert files(tmp_path / "here/tiny/1") == files(bundle)


def test_many_pulls_at_once_do_not_get_into_each_others_way(
    make_bundle: Callable[..., Path], tmp_path: Path, order: Orders
) -> None:
    for number in range(3):
        make_bundle(tmp_path / f"models/m{number}/1", f"m{number}", number, 1000)
        (tmp_path / f"models/m{number}/model.toml").write_text(f"# {number}\n")
    errors: list[BaseException] = []

    def work(folder: Path) -> None:
        try:
            bring(str(tmp_path / "models"), folder, order())
        except OSError as error:
            errors.append(error)

    for attempt in range(8):
        pulls = [threading.Thread(target=work, args=[tmp_path / f"here{attempt}"]) for _ in range(6)]
        for each in pulls:
            each.start()
        for each in pulls:
            each.join()
    assert not errors


def test_a_watcher_never_sees_half_a_version(s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders) -> None:
    """While the last file is on its way, nothing is to be seen."""
    s3.put(bundle, "m")
    here, seen = tmp_path / "here", []
    s3_proxy.harms.append(Harm(BIG_FILE, BIG_BYTES // 2, "cut"))
    s3_proxy.on_harm = lambda: seen.append([path for path in here.glob("*") if not path.name.startswith(".")])
    bring("s3://models/m", here, order())
    assert seen == [[]]


# --- Networks.


def range_of(head: str) -> int:
    found = re.search(r"range: bytes=(\d+)-", head)
    return int(found[1]) if found else 0


@pytest.fixture(params=["s3", "registry", "web"])
def shop(request: pytest.FixtureRequest, bundle: Path) -> "tuple[Proxy, str, str]":
    """A bundle behind a proxy: that, the address, and the end of the path of its large file."""
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        s3.put(bundle, "m")
        return request.getfixturevalue("s3_proxy"), "s3://models/m", BIG_FILE
    if request.param == "registry":
        registry: Registry = request.getfixturevalue("registry")
        registry.push(bundle, "shop:1")
        proxy = request.getfixturevalue("registry_proxy")
        return proxy, f"oci://127.0.0.1:{proxy.port}/shop:1", hash_file(bundle / BIG_FILE)
    shutil.copytree(bundle, request.getfixturevalue("web_folder") / "tiny")
    proxy = request.getfixturevalue("web_proxy")
    return proxy, f"http://127.0.0.1:{proxy.port}/tiny", BIG_FILE


@pytest.fixture
def registry_proxy(registry: Registry):
    with proxy_to(registry.port) as proxy:
        yield proxy


@pytest.fixture
def web_proxy(web: int):
    with proxy_to(web) as proxy:
        yield proxy


def test_a_broken_connection_is_gone_on_from(shop: tuple[Proxy, str, str], bundle: Path, tmp_path: Path, order: Orders) -> None:
    proxy, address, big = shop
    proxy.harms += [Harm(big, 1_000_000, "cut"), Harm(big, 700_000, "cut")]
    assert bring(address, tmp_path / "here", order()) == ["tiny/1"]
    assert files(tmp_path / "here/tiny/1") == files(bundle)
    starts = [range_of(head) for head in proxy.asked(big)]
    assert starts[0] == 0 and 0 < starts[1] <= 1_000_000 and starts[1] < starts[2] <= starts[1] + 700_000


def test_a_pull_that_ended_is_gone_on_with_by_the_next(
    shop: tuple[Proxy, str, str], bundle: Path, tmp_path: Path, order: Orders
) -> None:
    proxy, address, big = shop
    proxy.harms += [Harm(big, 2_000_000, "cut"), Harm(big, 0, "cut", times=1000)]
    with pytest.raises(StoreError):
        bring(address, tmp_path / "here", order())
    assert not list((tmp_path / "here").glob("[!.]*")) and no_leftovers(tmp_path / "here")
    proxy.harms.clear()
    proxy.requests.clear()
    assert bring(address, tmp_path / "here", order()) == ["tiny/1"]
    (head,) = proxy.asked(big)
    assert 1_900_000 <= range_of(head) <= 2_000_000
    assert files(tmp_path / "here/tiny/1") == files(bundle)


def test_a_beginning_of_something_else_is_started_anew(
    shop: tuple[Proxy, str, str], bundle: Path, tmp_path: Path, order: Orders
) -> None:
    proxy, address, big = shop
    partial = tmp_path / "cache/partial" / hash_file(bundle / BIG_FILE)
    partial.parent.mkdir(parents=True)
    for size in (1000, BIG_BYTES, BIG_BYTES + 1):
        partial.write_bytes(b"?" * size)
        proxy.requests.clear()
        assert bring(address, tmp_path / str(size), order()) == ["tiny/1"]
        assert range_of(proxy.asked(big)[-1]) == 0
        assert files(tmp_path / str(size) / "tiny/1") == files(bundle)
        shutil.rmtree(tmp_path / "cache/objects")


def test_a_bit_that_changed_on_the_way_is_found(shop: tuple[Proxy, str, str], bundle: Path, tmp_path: Path, order: Orders) -> None:
    proxy, address, big = shop
    proxy.harms.append(Harm(big, 12345, "flip", times=1000))
    with pytest.raises(BundleError, match=rf"{BIG_FILE}: SHA-256 [0-9a-f]+, but it should be {hash_file(bundle / BIG_FILE)}"):
        bring(address, tmp_path / "here", order())
    assert not list((tmp_path / "here").glob("[!.]*")) and no_leftovers(tmp_path / "here")
    assert not list((tmp_path / "cache/objects").glob(f"*/{hash_file(bundle / BIG_FILE)}"))
    proxy.harms.clear()
    assert bring(address, tmp_path / "here", order()) == ["tiny/1"]


def test_a_bit_that_changed_in_a_piece_only_is_made_good(
    shop: tuple[Proxy, str, str], bundle: Path, tmp_path: Path, order: Orders
) -> None:
    proxy, address, big = shop
    proxy.harms += [Harm(big, 1_000_000, "cut"), Harm(big, 12345, "flip")]
    assert bring(address, tmp_path / "here", order()) == ["tiny/1"]
    assert files(tmp_path / "here/tiny/1") == files(bundle)


def test_a_store_that_gives_a_drop_and_breaks_off_is_not_asked_for_ever(
    shop: tuple[Proxy, str, str], tmp_path: Path, order: Orders
) -> None:
    proxy, address, big = shop
    proxy.harms.append(Harm(big, 1, "cut", times=10_000))
    with pytest.raises(StoreError):
        bring(address, tmp_path / "here", order())
    assert len(proxy.asked(big)) <= 12


def test_a_silent_store_is_not_waited_for(shop: tuple[Proxy, str, str], tmp_path: Path, order: Orders) -> None:
    proxy, address, big = shop
    proxy.harms.append(Harm(big, 100_000, "stall", times=1000))
    with pytest.raises(StoreError, match=rf"{BIG_FILE}: silent for 3 seconds"):
        bring(address, tmp_path / "here", order(silence_seconds=3))
    assert proxy.stalled.is_set()


def test_a_vanished_file_is_named(s3: S3, bundle: Path, tmp_path: Path, order: Orders) -> None:
    s3.put(bundle, "m")
    s3.client.delete_object(Bucket="models", Key=f"m/{BIG_FILE}")
    with pytest.raises(StoreError, match=rf"s3://models/m/{BIG_FILE}: no such file"):
        bring("s3://models/m", tmp_path / "here", order())


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_named(s3: S3, bundle: Path, tmp_path: Path, order: Orders, change: int) -> None:
    s3.put(bundle, "m")
    s3.client.put_object(Bucket="models", Key=f"m/{BIG_FILE}", Body=b"x" * (BIG_BYTES + change))
    with pytest.raises(BundleError, match=rf"s3://models/m/{BIG_FILE}: .*{BIG_BYTES}"):
        bring("s3://models/m", tmp_path / "here", order())


def test_nobody_there_is_one_line_and_soon(tmp_path: Path, order: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "i", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, value)
    for address in ("s3://models/m", "oci://127.0.0.1:9/m:1", "http://127.0.0.1:9/m"):
        with pytest.raises(StoreError, match=rf"\A{address}[^\n]*\Z"):
            bring(address, tmp_path / "here", order())


def test_places_without_bundles_are_named(s3: S3, web: int, registry: Registry, tmp_path: Path, order: Orders) -> None:
    (tmp_path / "empty").mkdir()
    for address in ("s3://models/m", str(tmp_path / "empty"), f"http://127.0.0.1:{web}"):
        with pytest.raises(BundleError, match=rf"{re.escape(address)}: holds no bundle"):
            bring(address, tmp_path / "here", order())
    for address in (
        "s3://nobody/m",
        str(tmp_path / "nowhere"),
        f"oci://127.0.0.1:{registry.port}/no:1",
        f"http://127.0.0.1:{web}/no",
    ):
        with pytest.raises((StoreError, BundleError), match=rf"\A{re.escape(address)}[^\n]*\Z"):
            bring(address, tmp_path / "here", order())


# --- What is refused.


def test_a_manifest_must_have_the_checksum_that_is_asked_for(s3: S3, bundle: Path, tmp_path: Path, order: Orders) -> None:
    s3.put(bundle, "m")
    with pytest.raises(BundleError, match=rf"s3://models/m/bundle.json: SHA-256 {digest(bundle)}, but {'0' * 64} is asked for"):
        bring("s3://models/m", tmp_path / "here", order(sha256="0" * 64))
    assert bring("s3://models/m", tmp_path / "here", order(sha256=digest(bundle))) == ["tiny/1"]


def test_nothing_of_an_unsigned_bundle_is_read(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders, keys: Keys, key: Path
) -> None:
    s3.put(bundle, "m")
    with pytest.raises(BundleError, match=r"s3://models/m: is not signed"):
        bring("s3://models/m", tmp_path / "here", order(keys=keys))
    sign(bundle / "bundle.json", key)
    (bundle / "bundle.json").write_text((bundle / "bundle.json").read_text().replace('"tiny"', '"tina"'))
    s3.put(bundle, "m")
    with pytest.raises(BundleError, match=r"s3://models/m/bundle.json: is not what key [0-9a-f]{64} signed"):
        bring("s3://models/m", tmp_path / "here", order(keys=keys))
    assert not s3_proxy.asked(BIG_FILE) and not s3_proxy.asked("encoder.onnx")
    sign(bundle / "bundle.json", key)
    s3.put(bundle, "m")
    assert bring("s3://models/m", tmp_path / "here", order(keys=keys)) == ["tina/1"]
    Bundle.open(tmp_path / "here/tina/1", keys=keys)


def test_a_signature_that_comes_later_is_brought_too(
    s3: S3, bundle: Path, tmp_path: Path, order: Orders, keys: Keys, key: Path
) -> None:
    s3.put(bundle, "m")
    bring("s3://models/m", tmp_path / "here", order())
    sign(bundle / "bundle.json", key)
    s3.put(bundle, "m")
    assert bring("s3://models/m", tmp_path / "here", order(keys=keys)) == ["tiny/1"]
    Bundle.open(tmp_path / "here/tiny/1", keys=keys)


def test_what_anybody_may_change_on_the_way_must_be_proved(tmp_path: Path, order: Orders) -> None:
    with pytest.raises(InputError, match=r"http://models\.example/m: without TLS, what comes must be signed"):
        bring("http://models.example/m", tmp_path / "here", order())


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/outside", "tokenizer/../../outside", "a\\..\\b", ".pulled.json", "bundle.json.sig", "bundle.json"]
)
def test_files_that_lead_elsewhere_are_refused(bundle: Path, tmp_path: Path, order: Orders, path: str) -> None:
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["files"][path] = manifest["files"][BIG_FILE]
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"bundle\.json: "):
        bring(str(bundle), tmp_path / "here", order())
    assert not list((tmp_path / "here").glob("[!.]*"))
    assert not (tmp_path / "outside").exists()


def test_links_out_of_a_folder_are_not_followed(bundle: Path, tmp_path: Path, order: Orders) -> None:
    shutil.copyfile(bundle / BIG_FILE, tmp_path / "secret")
    (bundle / BIG_FILE).unlink()
    (bundle / BIG_FILE).symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match=rf"{BIG_FILE}: a link that leads out of the folder"):
        bring(str(bundle), tmp_path / "here", order())


def test_a_version_of_another_model_is_refused(bundle: Path, tmp_path: Path, order: Orders) -> None:
    shutil.copytree(bundle, tmp_path / "models/fr-de/1")
    with pytest.raises(BundleError, match=r"fr-de/1/bundle\.json: is of model tiny, but lies in the folder of fr-de"):
        bring(str(tmp_path / "models"), tmp_path / "here", order())


@pytest.mark.parametrize("name", ["../../outside", "en-de/../../../outside"])
def test_archives_that_lead_elsewhere_are_refused(bundle: Path, tmp_path: Path, order: Orders, name: str) -> None:
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(bundle, "en-de")
        archive.add(bundle / "bundle.json", name)
    with pytest.raises(BundleError, match=r"evil\.tar: cannot be unpacked"):
        bring(str(path), tmp_path / "a/b/here", order(sha256=hash_file(path)))
    assert not [found for found in tmp_path.rglob("outside")]
    assert not list((tmp_path / "a/b/here").glob("[!.]*"))


@pytest.mark.parametrize(
    "content", [b"", b"no tar at all" * 100, b"\x1f\x8b\x08\x00 broken", b"\xfd7zXZ\x00 broken", b"BZh9 broken"]
)
def test_an_archive_that_is_none_is_named(tmp_path: Path, order: Orders, content: bytes) -> None:
    path = tmp_path / "none.tar.gz"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"\A[^\n]*none\.tar\.gz: [^\n]*\Z"):
        bring(str(path), tmp_path / "here", order(sha256=hash_file(path)))


def test_an_archive_of_more_than_the_disk_holds_is_refused(tmp_path: Path, order: Orders) -> None:
    path = tmp_path / "bomb.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("hole")
        member.size = 0
        archive.addfile(member)
    content = bytearray(path.read_bytes())
    member.size = 1 << 45
    content[:512] = member.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"bomb\.tar: holds more than there is room for"):
        bring(str(path), tmp_path / "here", order(sha256=hash_file(path)))


def test_a_bundle_larger_than_the_cache_may_be_is_named(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, order: Orders
) -> None:
    s3.put(bundle, "m")
    small = Cache(tmp_path / "small", BIG_BYTES / 2**30)
    with pytest.raises(
        BundleError, match=rf"s3://models/m: has \d+ bytes, and the cache in {tmp_path / 'small'} may hold {BIG_BYTES}"
    ):
        bring("s3://models/m", tmp_path / "here", order(cache=small))
    assert not s3_proxy.asked(BIG_FILE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights_is_named(bundle: Path, tmp_path: Path, order: Orders) -> None:
    (tmp_path / "here").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match=str(tmp_path / "here")):
        bring(str(bundle), tmp_path / "here", order())
