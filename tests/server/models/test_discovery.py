"""Scans of a folder of models: what is found, what is left out with which reason, and how it changes between two scans."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError
from dragoman.server.models import discovery as folders
from dragoman.server.models import model_file
from dragoman.server.models.discovery import FoundModel, find_models, find_unused, refuse_damaged_files, scan
from tests.server.models.copies import copy

HALF = '{"name": '


def put(directory: Path, name: str, content: str = "") -> Path:
    """Write as much of a bundle as a scan looks at."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bundle.json").write_text(content or json.dumps({"name": name, "files": {}}))
    return directory


def lay(root: Path, *entries: str) -> Path:
    """Create folders (`a/`), links (`a -> b`), text files (`a = text`) and bundles (`a/1`, of the model that `a/1: name` names)."""
    for entry in entries:
        path, _, target = entry.partition(" -> ")
        path, _, text = path.partition(" = ")
        path, _, name = path.partition(": ")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (root / path).symlink_to(target)
        elif text:
            (root / path).write_text(text)
        elif entry.endswith("/"):
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            put(root / path, name or path.split("/")[0])
    return root


def versions(models: list[FoundModel]) -> dict[str, list[str]]:
    return {model.name: [version.name for version in model.versions] for model in models}


OTHER = os.fsdecode(b"\xff")
FLAT = [""]
LAYOUTS = [
    ([], {}, []),
    (["en-de/10", "en-de/2", "en-de/1", "whatever: en-fr"], {"en-de": ["1", "2", "10"], "en-fr": FLAT}, []),
    ([".copying: en-de", "en-de/.4.copying", "en-de/3", "en-de/4/", "en-de/notes = x"], {"en-de": ["3"]}, []),
    (["en-de: en-de", "lost+found/", "docs/old/", "README = x"], {"en-de": FLAT}, []),
    (["en-de/1: en-fr"], {"en-de": ["1"]}, []),
    (["en-de/model.toml = [versions]"], {"en-de": []}, []),
    (["en-de/1", "a b/1"], {"en-de": ["1"], "a b": []}, ["/a b: name must be"]),
    (["Readiness/1"], {"Readiness": []}, ["gRPC health"]),
    (
        ["en-de", "en-de/1", "en-fr/1"],
        {"en-de": [], "en-fr": ["1"]},
        ["holds bundle.json beside folders of versions (1); only one"],
    ),
    (["a: en-de", "b: en-de", "en-fr"], {"en-de": [], "en-fr": FLAT}, ['/a, /b: each holds a model named "en-de"']),
    (["en-de/1", "en-de/current -> 1"], {"en-de": ["1"]}, ["/en-de/current: a link to 1, which is looked at itself; a label can"]),
    (["x: en-de", "now -> x", "en-de -> x"], {"en-de": FLAT, "now": []}, ["/now: a link to x, which is looked at itself"]),
    (
        ["en-fr", "en-fr/self -> .", "all -> ."],
        {"all": [], "en-fr": FLAT},
        ["/all: a link to , which", "/en-fr/self: a link to /en-fr, which"],
    ),
    (["en-de/1", "en-de/2 -> 3", "en-de/3 -> 2", "en-de/5 -> nowhere", "en-de/up -> .."], {"en-de": ["1"]}, []),
    (["en-de/1", "en-de/4/bundle.json -> bundle.json"], {"en-de": ["1"]}, ["/en-de/4/bundle.json: Too many levels"]),
    ([f"en-de/{OTHER}", "en-de/1"], {"en-de": ["1"]}, ["\\udcff"]),
    ([f"{OTHER}/1: x"], {"\\udcff": []}, ["\\udcff"]),
    *(([f"en-de/{name}", "en-de/1"], {"en-de": ["1"]}, ["is no name of a version"]) for name in ("a b", "é", "-1", "0" * 65)),
]


@pytest.mark.parametrize(
    ("entries", "expected", "reasons"), LAYOUTS, ids=[",".join(row[0]).encode("ascii", "replace").decode() for row in LAYOUTS]
)
def test_models_and_versions_of(tmp_path: Path, entries: list[str], expected: dict[str, list[str]], reasons: list[str]) -> None:
    lay(tmp_path, *entries)
    models = scan(tmp_path)
    assert versions(models) == expected
    told = [text.replace(str(tmp_path), "") for model in models for text in (model.problem, *model.left_out) if text]
    assert len(told) == len(reasons) and all(reason in text for reason, text in zip(reasons, told, strict=True))
    assert all(text.encode() and "\n" not in text for text in (*told, *(model.name for model in models)))
    assert all(not model.file_problem for model in models) and scan(tmp_path, models) == models


def test_bundles_are_opened_by_their_models_names_and_a_folder_that_is_none_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    def names(folder: Path) -> list[str]:
        return [model.name for model in find_models(folder)]

    lay(tmp_path, "models/lost+found/", "models/README = x", "en-de/1", "file = x")
    lay(tmp_path, "mine: en-de", "mine/tokenizer/", "mine/model.toml = [settings]\nmax_slots = 3")
    (model,) = scan(tmp_path / "mine")
    assert (model.name, model.directory, model.file.settings.max_slots) == ("en-de", tmp_path / "mine", 3)
    assert [version.directory for version in model.versions] == [tmp_path / "mine"]
    for which, reason in (("missing", "no such folder"), ("file", "not a folder")):
        for find in (scan, find_models):
            with pytest.raises(BundleError, match=f"^{tmp_path / which}: {reason}"):
                find(tmp_path / which)
            with pytest.raises(BundleError, match=f"^{tmp_path / which}: {reason}$"):
                find(tmp_path, files=tmp_path / which)
    with pytest.raises(BundleError, match=rf"^{tmp_path / 'models'}: holds no bundle .*bundle\.json\)$"):
        find_models(tmp_path / "models")
    lay(tmp_path, "models/t5/config.json = {}")
    for which in ("models", "models/t5"):
        with pytest.raises(BundleError, match=f"{tmp_path / 'models/t5'} is a checkpoint, of which `dragoman export`"):
            find_models(tmp_path / which)
    copy(tiny_bundle, tmp_path / "models/1", "zeta")
    copy(tiny_bundle, tmp_path / "models/2", "alpha")
    copy(tiny_bundle, tmp_path / "models/.one.half-copied", "one")
    assert (names(tiny_bundle), names(tmp_path / "models")) == (["tiny"], ["alpha", "zeta"])
    copy(tiny_bundle, tmp_path / "models/b", "zeta")
    with pytest.raises(BundleError, match=r'/1, .*/b: each holds a model named "zeta"'):
        find_models(tmp_path / "models")


@pytest.mark.parametrize("content", ['{"name": "en-de", "fil', " ", '{"name": "en-de"}}'])
def test_version_whose_manifest_is_incomplete_is_not_there_yet_or_stays_as_it_was(tmp_path: Path, content: str) -> None:
    lay(tmp_path, "en-de/1", "flat: en-fr")
    whole = scan(tmp_path)
    for path in ("en-de/1", "en-de/2", "flat"):
        put(tmp_path / path, "", content)
    half = scan(tmp_path, whole)
    assert [model.versions for model in half] == [model.versions for model in whole]
    reasons = [reason for model in half for reason in model.left_out]
    assert len(reasons) == 3 and all("/bundle.json: is not complete: " in reason and "\n" not in reason for reason in reasons)
    lay(tmp_path, "en-de/1", "en-de/2", "flat: en-fr")
    after = scan(tmp_path, half)
    assert (versions(after), after[0].left_out) == ({"en-de": ["1", "2"], "en-fr": FLAT}, ())
    (tmp_path / "flat" / "bundle.json").unlink()
    assert versions(scan(tmp_path, after)) == {"en-de": ["1", "2"]}


@pytest.mark.parametrize("content", ["[]", "{}", '{"name": 3}', '{"name": "a b"}', "[" * 100_000 + "]" * 100_000, None])
def test_manifest_that_names_no_model_is_left_to_the_opening_of_the_bundle(tmp_path: Path, content: str | None) -> None:
    if content is None:  # a pipe, which is not waited for
        lay(tmp_path, "en-de/1/", "en-fr/")
        for path in ("en-de/1", "en-fr"):
            os.mkfifo(tmp_path / path / "bundle.json")
    else:
        put(tmp_path / "en-de/1", "", content)
        put(tmp_path / "en-fr", "", content)
    models = scan(tmp_path)
    assert versions(models) == {"en-de": ["1"], "en-fr": FLAT}
    assert [version.model for model in models for version in model.versions] == ["", ""]


# Between two scans.


def test_model_keeps_its_versions_while_its_folder_is_ambiguous(tmp_path: Path) -> None:
    flat = scan(lay(tmp_path, "x: en-de", "b: en-fr"))
    both = scan(lay(tmp_path, "x/1: another", "a: en-fr"), flat)
    assert [model.versions for model in both] == [model.versions for model in flat] and all(model.problem for model in both)
    assert both[1].directory == tmp_path / "b" and versions(both) == {"en-de": FLAT, "en-fr": FLAT}
    (tmp_path / "x" / "bundle.json").unlink()
    shutil.rmtree(tmp_path / "a")
    after = scan(tmp_path, both)
    assert versions(after) == {"x": ["1"], "en-fr": FLAT} and not any(model.problem for model in after)
    (mixed, _) = scan(lay(tmp_path, "x: another"), after)[::-1]
    assert (mixed.name, mixed.versions) == ("x", next(model for model in after if model.name == "x").versions)


def test_links_that_are_exchanged_are_other_versions(tmp_path: Path) -> None:
    """Also a link above them, as Kubernetes exchanges a ConfigMap."""
    lay(tmp_path, "store/x1: en-de", "store/x2: en-de", "store/en-fr/1: en-fr", "models/en-fr -> ../store/en-fr")
    lay(tmp_path, "models/en-de/1 -> ../../store/x1", "models/ro-de/..1/b: ro-de", "models/ro-de/..2/b: ro-de")
    lay(tmp_path, "models/ro-de/..data -> ..1", "models/ro-de/v1 -> ..data/b")
    before = scan(tmp_path / "models")
    assert versions(before) == {"en-de": ["1"], "en-fr": ["1"], "ro-de": ["v1"]}
    lay(tmp_path, "models/en-de/new -> ../../store/x2", "models/ro-de/..new -> ..2")
    os.replace(tmp_path / "models/en-de/new", tmp_path / "models/en-de/1")
    os.replace(tmp_path / "models/ro-de/..new", tmp_path / "models/ro-de/..data")
    after = scan(tmp_path / "models", before)
    assert versions(after) == versions(before)
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, False]


def test_stamp_changes_with_the_manifest_and_nothing_else(tmp_path: Path) -> None:
    directory = put(tmp_path / "en-de" / "1", "en-de")
    manifest = directory / "bundle.json"
    text = manifest.read_text()
    first = scan(tmp_path)
    (directory / "encoder.onnx").write_text("x")
    assert scan(tmp_path, first) == first == scan(tmp_path)
    stamps = [first[0].versions[0].stamp]
    times = (manifest.stat().st_atime_ns, manifest.stat().st_mtime_ns)
    (directory / "other").write_text(text)
    os.utime(directory / "other", ns=times)
    for change in (
        lambda: os.replace(directory / "other", manifest),
        lambda: os.utime(manifest, ns=(times[0], times[1] + 1)),
        lambda: (manifest.write_text(text + " "), os.utime(manifest, ns=times)),
    ):
        change()
        stamps.append(scan(tmp_path, first)[0].versions[0].stamp)
    assert len(set(stamps)) == 4


NAMES = st.sampled_from(["a", "b", "c", "en-de"])
TREES = st.dictionaries(
    NAMES, st.one_of(st.just("flat"), st.sets(st.sampled_from(["1", "2", "10", "v1", ".9", "half"]), max_size=4))
)


@settings(max_examples=40)
@given(TREES, TREES)
def test_scan_finds_the_same_whatever_was_there_before(tmp_path_factory: Any, first: Any, second: Any) -> None:
    folder = tmp_path_factory.mktemp("models")

    def exchange(models: Any) -> None:
        for entry in folder.iterdir():
            shutil.rmtree(entry)
        for name, what in models.items():
            lay(folder, name) if what == "flat" else [
                put(folder / name / version, name, HALF if version == "half" else "") for version in what
            ]

    exchange(first)
    before = scan(folder)
    assert versions(before) == {
        name: FLAT if what == "flat" else [version for version in ("1", "2", "10", "v1") if version in what]
        for name, what in sorted(first.items())
        if what == "flat" or what - {".9"}
    }
    exchange(second)
    assert scan(folder, before) == scan(folder)


# Rights and errors. A superuser may read everything, so the refusals are made.


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a call for a path fail."""

    def fail(where: Any, call: str, path: Path, number: int = errno.EACCES) -> None:
        real = getattr(where, call)

        def called(given: Any, *args: Any) -> Any:
            if os.fspath(given) == str(path):
                raise OSError(number, os.strerror(number), str(path))
            return real(given, *args)

        monkeypatch.setattr(where, call, called)

    return fail


def test_folder_that_cannot_be_read_is_as_it_was(tmp_path: Path, deny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, "known/1", "new/1", "other/1", "lost+found/")
    before = [model for model in scan(tmp_path) if model.name != "new"]
    for name in ("known", "new", "lost+found"):
        deny(os, "scandir", tmp_path / name)
    after = scan(tmp_path, before)
    assert versions(after) == {"known": ["1"], "new": [], "other": ["1"]}
    denied = [f"{tmp_path}/{name}: cannot be read: Permission denied" for name in ("known", "new")]
    assert [model.problem for model in after] == [*denied, ""]
    monkeypatch.undo()
    assert scan(tmp_path, after) == scan(tmp_path)
    deny(os, "scandir", tmp_path)
    with pytest.raises(BundleError, match=f"{tmp_path}: Permission denied"):
        scan(tmp_path)


@pytest.mark.parametrize(("where", "call", "is_kept"), [(folders, "read_bounded", False), (os, "stat", True)])
def test_version_that_cannot_be_read_is_found_and_another_once_it_can(
    tmp_path: Path, deny: Any, monkeypatch: pytest.MonkeyPatch, where: Any, call: str, is_kept: bool
) -> None:
    known = scan(lay(tmp_path, "en-de/1", "en-de/2", "flat: en-fr", "flat/tokenizer/", "docs/private/"))
    for path in ("en-de/2", "flat/tokenizer", "docs/private"):
        deny(where, call, tmp_path / path / "bundle.json")
    assert scan(tmp_path, known) == known, "one that was known stays"
    closed = scan(tmp_path)
    assert versions(closed) == {"en-de": ["1", "2"], "en-fr": FLAT} and not closed[1].problem and scan(tmp_path, closed) == closed
    one, two = closed[0].versions
    assert (one.is_closed, two.is_closed, two.model) == (False, is_kept, "")
    monkeypatch.undo()
    assert scan(tmp_path, closed) == known and two.stamp != known[0].versions[1].stamp


@pytest.mark.parametrize(
    ("where", "call", "what", "left"),
    [
        (os, "scandir", "en-de", {}),
        (os, "stat", "en-de/2/bundle.json", {"en-de": ["1"]}),
        (folders, "read_bounded", "en-de/2/bundle.json", {"en-de": ["1"]}),
        (os, "stat", "en-de/model.toml", {"en-de": ["1", "2"]}),
        (model_file, "read_bounded", "en-de/model.toml", {"en-de": ["1", "2"]}),
    ],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_file_that_vanishes_during_a_scan_is_not_there(
    tmp_path: Path, deny: Any, where: Any, call: str, what: str, left: dict[str, list[str]], is_known: bool
) -> None:
    lay(tmp_path, "en-de/1", "en-de/2", "en-fr/1")
    before = scan(tmp_path) if is_known else []
    if what.endswith(".toml"):
        lay(tmp_path, "en-de/model.toml = [")
    put(tmp_path / "en-de" / "2", "", '{"name": "en-de", "is_new": true}')
    deny(where, call, tmp_path / what, errno.ENOENT)
    models = scan(tmp_path, before)
    assert versions(models) == left | {"en-fr": ["1"]}
    assert all(model.problem == "" and model.file_problem == "" for model in models)


# model.toml


def test_changed_model_file_is_used_at_once_or_when_two_scans_have_found_the_same(tmp_path: Path) -> None:
    path = lay(tmp_path, "en-de/1", "en-de/model.toml = [versions]\nlatest = 2") / "en-de/model.toml"
    found = scan(tmp_path)
    path.write_text("[versions]\nlatest = 3 # half")
    assert scan(tmp_path, found)[0].file.versions.latest == 3
    for text, latest in (("", 2), ("[versions]\nlatest = 33 # now whole", 2), ("", 33), (None, 33), ("", None)):
        if text is None:
            path.unlink()
        elif text:
            path.write_text(text)
        found = scan(tmp_path, found, is_at_once=False)
        assert found[0].file.versions.latest == latest


def test_damaged_model_file_stops_the_start_and_later_leaves_the_old_one_in_use(tmp_path: Path) -> None:
    lay(tmp_path, "a/1", "b/1", "c/1", "a/model.toml = [versions]\nlast = 1\n[swap]\nmode = 1", "b/model.toml = [")
    found = scan(tmp_path)
    assert versions(found) == versions(scan(tmp_path, found)) == {"a": [], "b": [], "c": ["1"]}
    with pytest.raises(ConfigError) as refusal:
        refuse_damaged_files(found)
    assert [line.split(": ")[:2] for line in str(refusal.value).splitlines()] == [
        [f"{tmp_path}/a/model.toml", "versions.last"],
        [f"{tmp_path}/a/model.toml", "swap.mode"],
        [f"{tmp_path}/b/model.toml", "not a TOML file"],
    ]
    refuse_damaged_files(found[2:])
    (tmp_path / "b/model.toml").unlink()
    for text, latest, problem in (("2", 2, ""), ("0", 2, "versions.latest: 0"), ("4", 4, "")):
        (tmp_path / "a/model.toml").write_text(f"[versions]\nlatest = {text}")
        for _ in range(2):
            found = scan(tmp_path, found)
            assert versions(found) == {"a": ["1"], "b": ["1"], "c": ["1"]}
            assert (found[0].file.versions.latest, found[0].problem) == (latest, "")
            assert found[0].file_problem.startswith(f"{tmp_path}/a/model.toml: {problem}" if problem else "")
            assert bool(problem) == any(model.file_problem for model in found)


@pytest.mark.parametrize("call", ["stat", "read_bounded"])
def test_model_file_that_cannot_be_read_is_used_as_soon_as_it_can(
    tmp_path: Path, deny: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = lay(tmp_path, "en-de/1", "en-de/model.toml = [versions]\nlatest = 2") / "en-de/model.toml"
    before = scan(tmp_path)
    path.write_text("[versions]\nlatest = 3 ")
    deny(os if call == "stat" else model_file, call, path)
    for known in (before, scan(tmp_path, before)):
        denied = scan(tmp_path, known)
        assert (denied[0].file.versions.latest, versions(denied)) == (2, {"en-de": ["1"]})
        assert denied[0].file_problem == f"{path}: cannot be read: Permission denied"
    monkeypatch.undo()
    after = scan(tmp_path, denied)
    assert (after[0].file.versions.latest, after[0].file_problem) == (3, "")


def test_separate_model_files_replace_those_of_models_as_a_whole(tmp_path: Path) -> None:
    models, files = lay(tmp_path / "models", "en-de/1", "whatever: en-fr", "ro-de/1"), tmp_path / "files"
    for name in ("en-de", "whatever", "ro-de"):
        lay(models, f"{name}/model.toml = [settings]\nmax_slots = 3")
    # As the kubelet writes a ConfigMap: links through one link that is exchanged in one step.
    lay(files, "..1/en-de.toml = [versions]\nlatest = 2", "..2/en-de.toml = [versions]\nlatest = 4", "..data -> ..1")
    lay(files, "en-de.toml -> ..data/en-de.toml", "en-fr.toml = [settings]\nmax_slots = 5")
    found = scan(models, files=files)
    settings = {model.name: (model.file.versions.latest, model.file.settings.max_slots) for model in found}
    assert settings == {"en-de": (2, None), "en-fr": (None, 5), "ro-de": (None, 3)}, "by the model's name, not its folder's"
    (lay(files, "..new -> ..2", "en_de.toml = #", "x.toml = #") / "..new").rename(files / "..data")
    for latest in (2, 4):
        found = scan(models, found, False, files)
        assert found[0].file.versions.latest == latest
    assert find_unused(files, found) == ["en_de.toml", "x.toml"]
    (files / "..2/en-de.toml").write_text("[versions]\nlatst = 4")
    found = scan(models, found, True, files)
    assert found[0].file.versions.latest == 4
    assert found[0].file_problem == f"{files}/en-de.toml: versions.latst: unknown field; did you mean latest?"
    (files / "en-de.toml").unlink()
    found = scan(models, found, True, files)
    assert (found[0].file.settings.max_slots, found[0].file_problem) == (3, "")
