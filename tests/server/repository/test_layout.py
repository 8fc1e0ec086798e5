"""What lies in a folder of models, and how it changes."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError
from dragoman.server.repository import folders, layout, model_file
from dragoman.server.repository.bundles import find_models
from dragoman.server.repository.layout import FoundModel, find_unused, refuse_damaged_files, scan
from dragoman.server.repository.model_file import ModelFile, Versions


def put(directory: Path, name: str, content: str = "") -> Path:
    """Put down as much of a bundle as is looked at."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bundle.json").write_text(content or json.dumps({"name": name, "files": {}}))
    return directory


def versions(models: list[FoundModel]) -> dict[str, list[str]]:
    return {model.name: [version.name for version in model.versions] for model in models}


def test_flat_bundles_and_models_of_versions_lie_side_by_side(tmp_path: Path) -> None:
    for version in ("10", "2", "1"):
        put(tmp_path / "en-de" / version, "en-de")
    put(tmp_path / "whatever", "en-fr")
    models = scan(tmp_path)
    assert versions(models) == {"en-de": ["1", "2", "10"], "en-fr": [""]}
    assert [model.directory for model in models] == [tmp_path / "en-de", tmp_path / "whatever"]
    assert [version.directory for model in models for version in model.versions] == [
        *(tmp_path / "en-de" / version for version in ("1", "2", "10")),
        tmp_path / "whatever",
    ]
    assert {version.model for version in models[0].versions} == {"en-de"}
    assert all(not (model.problem or model.file_problem or model.left_out) for model in models)


def test_a_bundle_itself_will_do(tmp_path: Path) -> None:
    put(tmp_path / "mine", "en-de")
    (tmp_path / "mine" / "tokenizer").mkdir()
    (tmp_path / "mine" / "model.toml").write_text("[settings]\nmax_slots = 3")
    (model,) = scan(tmp_path / "mine")
    assert (model.name, model.directory, model.file.settings.max_slots) == ("en-de", tmp_path / "mine", 3)
    assert [version.directory for version in model.versions] == [tmp_path / "mine"]


def test_a_real_bundle_is_found(tiny_bundle: Path) -> None:
    (model,) = scan(tiny_bundle)
    assert (model.name, model.problem, len(model.versions)) == ("tiny", "", 1)


def test_an_empty_folder_has_no_models(tmp_path: Path) -> None:
    assert scan(tmp_path) == []


@pytest.mark.parametrize(("which", "reason"), [("missing", "no such folder"), ("file", "not a folder")])
def test_a_folder_that_is_none_is_named(tmp_path: Path, which: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=f"{tmp_path / which}: {reason}"):
        scan(tmp_path / which)


def test_what_is_hidden_or_no_bundle_is_left_alone(tmp_path: Path) -> None:
    put(tmp_path / ".copying", "en-de")
    put(tmp_path / "en-de" / ".4.copying", "en-de")
    put(tmp_path / "en-de" / "3", "en-de")
    (tmp_path / "en-de" / "4").mkdir()
    (tmp_path / "en-de" / "notes.txt").write_text("")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "docs" / "old").mkdir(parents=True)
    (tmp_path / "README").write_text("")
    models = scan(tmp_path)
    assert versions(models) == {"en-de": ["3"]}
    assert models[0].left_out == ()


@pytest.mark.parametrize("content", ['{"name": "en-de", "fil', " ", '{"name": "en-de"}}', "\x00\x00\x00"])
def test_a_version_without_the_whole_of_its_manifest_is_not_there_yet(tmp_path: Path, content: str) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    put(tmp_path / "en-de" / "2", "", content)
    (before,) = scan(tmp_path)
    assert versions([before]) == {"en-de": ["1"]}
    (reason,) = before.left_out
    assert reason.startswith(f"{tmp_path}/en-de/2/bundle.json: is not complete: ") and "\n" not in reason
    put(tmp_path / "en-de" / "2", "en-de")
    (after,) = scan(tmp_path, [before])
    assert (versions([after]), after.left_out) == ({"en-de": ["1", "2"]}, ())


def test_a_version_that_is_there_stays_while_its_manifest_is_being_written(tmp_path: Path) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    put(tmp_path / "flat", "en-fr")
    before = scan(tmp_path)
    put(tmp_path / "en-de" / "1", "", '{"name": ')
    put(tmp_path / "flat", "", '{"name": ')
    after = scan(tmp_path, before)
    assert [model.versions for model in after] == [model.versions for model in before]
    assert versions(after) == {"en-de": ["1"], "en-fr": [""]}
    assert all("is not complete" in model.left_out[0] for model in after)
    (tmp_path / "en-de" / "1" / "bundle.json").unlink()
    assert versions(scan(tmp_path, after)) == {"en-fr": [""]}


@pytest.mark.parametrize(
    "content", ["[]", "3", "{}", '{"name": 3}', '{"name": "a b"}', '{"name": ""}', "[" * 100_000 + "]" * 100_000]
)
def test_a_whole_manifest_that_names_no_model_is_left_to_whoever_opens_it(tmp_path: Path, content: str) -> None:
    put(tmp_path / "en-de" / "1", "", content)
    put(tmp_path / "en-fr", "", content)
    models = scan(tmp_path)
    assert versions(models) == {"en-de": ["1"], "en-fr": [""]}
    assert [version.model for model in models for version in model.versions] == ["", ""]


def test_a_manifest_of_another_model_tells_so(tmp_path: Path) -> None:
    put(tmp_path / "en-de" / "1", "en-fr")
    (model,) = scan(tmp_path)
    assert (model.name, model.versions[0].model) == ("en-de", "en-fr")


@pytest.mark.parametrize("name", ["a b", "é", "-1", "0" * 65, "lost+found"])
def test_a_folder_that_no_version_can_be_called_is_left_out_with_the_reason(tmp_path: Path, name: str) -> None:
    put(tmp_path / "en-de" / name, "en-de")
    put(tmp_path / "en-de" / "1", "en-de")
    (model,) = scan(tmp_path)
    assert versions([model]) == {"en-de": ["1"]}
    assert len(model.left_out) == 1 and "is no name of a version" in model.left_out[0]


def test_a_folder_that_no_model_can_be_called_is_a_problem_of_its_own(tmp_path: Path) -> None:
    put(tmp_path / "a b" / "1", "a b")
    put(tmp_path / "Readiness" / "1", "Readiness")
    put(tmp_path / "en-de" / "1", "en-de")
    models = scan(tmp_path)
    assert versions(models) == {"Readiness": [], "a b": [], "en-de": ["1"]}
    assert "gRPC health" in models[0].problem and "name must be" in models[1].problem and models[2].problem == ""


def test_names_that_are_no_text_are_told_as_text(tmp_path: Path) -> None:
    other = os.fsdecode(b"\xff")
    put(tmp_path / other / "1", "en-fr")
    put(tmp_path / "en-de" / "1", "en-de")
    put(tmp_path / "en-de" / other, "en-de")
    for before in ((), scan(tmp_path)):
        models = scan(tmp_path, before)
        assert versions(models) == {"\\udcff": [], "en-de": ["1"]}
        texts = [text for model in models for text in (model.name, model.problem, *model.left_out) if text]
        assert len(texts) == 4 and all(text.encode() for text in texts)


def test_a_bundle_beside_versions_is_refused_and_nobody_else(tmp_path: Path) -> None:
    put(tmp_path / "en-de", "en-de")
    put(tmp_path / "en-de" / "1", "en-de")
    put(tmp_path / "en-fr" / "1", "en-fr")
    refused, other = scan(tmp_path)
    assert refused.versions == () and other.problem == "" and len(other.versions) == 1
    assert refused.problem == (
        f"{tmp_path}/en-de: holds bundle.json beside folders of versions (1); only one of the two can be meant"
    )


def test_a_model_moves_from_flat_to_versions_without_a_moment_away(tmp_path: Path) -> None:
    put(tmp_path / "en-de", "en-de")
    flat = scan(tmp_path)
    put(tmp_path / "en-de" / "1", "en-de")
    both = scan(tmp_path, flat)
    assert both[0].versions == flat[0].versions and both[0].problem
    (tmp_path / "en-de" / "bundle.json").unlink()
    after = scan(tmp_path, both)
    assert (versions(after), after[0].problem) == ({"en-de": ["1"]}, "")


def test_a_bundle_dropped_among_versions_does_not_rename_the_model(tmp_path: Path) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    before = scan(tmp_path)
    put(tmp_path / "en-de", "another")
    (model,) = scan(tmp_path, before)
    assert (model.name, model.versions) == ("en-de", before[0].versions)


def test_two_folders_of_one_model_are_both_named_and_the_one_from_before_goes_on(tmp_path: Path) -> None:
    put(tmp_path / "b", "en-de")
    before = scan(tmp_path)
    put(tmp_path / "a", "en-de")
    put(tmp_path / "c", "en-fr")
    model, other = scan(tmp_path, before)
    assert model.versions == before[0].versions and model.directory == tmp_path / "b"
    assert model.problem == f'{tmp_path}/a, {tmp_path}/b: each holds a model named "en-de"'
    assert other.problem == "" and other.versions
    assert versions(scan(tmp_path)) == {"en-de": [], "en-fr": [""]}, "at the start there is no telling which is meant"
    shutil.rmtree(tmp_path / "a")
    assert scan(tmp_path, [model, other])[0].problem == ""


def test_links_to_versions_elsewhere_are_versions(tmp_path: Path) -> None:
    store, models = tmp_path / "store", tmp_path / "models"
    first, second = put(store / "x1", "en-de"), put(store / "x2", "en-de")
    (models / "en-de").mkdir(parents=True)
    (models / "en-de" / "1").symlink_to(first)
    (models / "en-fr").symlink_to(put(store / "en-fr" / "1", "en-fr").parent)
    before = scan(models)
    assert versions(before) == {"en-de": ["1"], "en-fr": ["1"]}
    (models / "en-de" / "new").symlink_to(second)
    os.replace(models / "en-de" / "new", models / "en-de" / "1")
    after = scan(models, before)
    assert after[0].versions[0].stamp != before[0].versions[0].stamp
    assert after[1] == before[1]


def test_files_behind_a_link_that_is_swapped_are_seen(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap."""
    for generation in ("..1", "..2"):
        put(tmp_path / "en-de" / generation / "bundle", "en-de")
    (tmp_path / "en-de" / "..data").symlink_to("..1")
    (tmp_path / "en-de" / "v1").symlink_to("..data/bundle")
    before = scan(tmp_path)
    (tmp_path / "en-de" / "..new").symlink_to("..2")
    os.replace(tmp_path / "en-de" / "..new", tmp_path / "en-de" / "..data")
    after = scan(tmp_path, before)
    assert versions(before) == versions(after) == {"en-de": ["v1"]}
    assert before[0].versions[0].stamp != after[0].versions[0].stamp


def test_a_second_name_of_a_version_is_no_version(tmp_path: Path) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    (tmp_path / "en-de" / "current").symlink_to("1")
    (model,) = scan(tmp_path)
    assert versions([model]) == {"en-de": ["1"]}
    assert model.left_out == (f"{tmp_path}/en-de/current: a link to 1, which is looked at itself; a label can name a version",)


def test_a_second_name_of_a_model_harms_nobody(tmp_path: Path) -> None:
    put(tmp_path / "en-de-2024", "en-de")
    (tmp_path / "current").symlink_to("en-de-2024")
    (tmp_path / "en-de").symlink_to("en-de-2024")
    link, model = scan(tmp_path)
    assert link.problem == f"{tmp_path}/current: a link to en-de-2024, which is looked at itself" and link.versions == ()
    assert (model.name, model.problem, len(model.versions)) == ("en-de", "", 1)


def test_links_in_circles_are_no_versions(tmp_path: Path) -> None:
    put(tmp_path / "flat", "en-fr")
    (tmp_path / "flat" / "self").symlink_to(".")
    put(tmp_path / "en-de" / "1", "en-de")
    (tmp_path / "en-de" / "2").symlink_to("3")
    (tmp_path / "en-de" / "3").symlink_to("2")
    (tmp_path / "en-de" / "4").mkdir()
    (tmp_path / "en-de" / "4" / "bundle.json").symlink_to("bundle.json")
    (tmp_path / "en-de" / "5").symlink_to("nowhere")
    (tmp_path / "en-de" / "up").symlink_to("..")
    (tmp_path / "all").symlink_to(".")
    models = scan(tmp_path)
    assert versions(models) == {"all": [], "en-de": ["1"], "en-fr": [""]}
    assert [model.problem for model in models] == [f"{tmp_path}/all: a link to {tmp_path}, which is looked at itself", "", ""]
    (reason,) = models[1].left_out
    assert reason.startswith(f"{tmp_path}/en-de/4/bundle.json: Too many levels")


def test_a_stamp_changes_with_the_file_and_with_nothing_else(tmp_path: Path) -> None:
    directory = put(tmp_path / "en-de" / "1", "en-de")
    manifest = directory / "bundle.json"
    text = manifest.read_text()
    first = scan(tmp_path)
    (directory / "encoder.onnx").write_text("x")
    assert scan(tmp_path, first) == first == scan(tmp_path)
    stamps = {first[0].versions[0].stamp}

    def changed() -> bool:
        stamp = scan(tmp_path, first)[0].versions[0].stamp
        is_new = stamp not in stamps
        stamps.add(stamp)
        return is_new

    times = (manifest.stat().st_atime_ns, manifest.stat().st_mtime_ns)
    (directory / "other").write_text(text)
    os.utime(directory / "other", ns=times)
    os.replace(directory / "other", manifest)
    assert changed(), "another file of the same size and time"
    os.utime(manifest, ns=(times[0], times[1] + 1))
    assert changed(), "the same file, written again a nanosecond later"
    manifest.write_text(text + " ")
    os.utime(manifest, ns=times)
    assert changed(), "the same file and time, another size"


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        put(tmp_path / "en-de" / str(number), "en-de")
    (tmp_path / "en-de" / "model.toml").write_text("[versions]\nlatest = 2")
    before = scan(tmp_path)
    read: list[Path] = []
    monkeypatch.setattr(folders, "read_bounded", lambda path, _: read.append(path) or path.read_bytes())  # type: ignore[func-returns-value]
    monkeypatch.setattr(layout, "read_model_file", lambda path: read.append(path) or ModelFile())  # type: ignore[func-returns-value]
    assert scan(tmp_path, before) == before and read == []
    put(tmp_path / "en-de" / "5", "en-de")
    after = scan(tmp_path, before)
    assert read == [tmp_path / "en-de" / "5" / "bundle.json"]
    assert all(old is new for old, new in zip(before[0].versions, after[0].versions, strict=False))


def test_a_file_that_cannot_be_used_is_read_again_when_it_changes_or_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes seconds to be refused must not take them every few seconds."""
    put(tmp_path / "en-de" / "1", "en-de")
    file = tmp_path / "en-de" / "model.toml"
    file.write_text("versions = 7")
    before = scan(tmp_path)
    read: list[Path] = []
    real = layout.read_model_file
    monkeypatch.setattr(layout, "read_model_file", lambda path: read.append(path) or real(path))  # type: ignore[func-returns-value]
    for _ in range(3):
        before = scan(tmp_path, before, is_at_once=False)
    assert read == [] and "versions" in before[0].file_problem
    before = scan(tmp_path, before)
    assert read == [file]
    file.write_text("versions = 77")
    for _ in range(2):
        before = scan(tmp_path, before, is_at_once=False)
    assert read == [file] * 2 and before[0].file_problem
    file.write_text("[versions]\nlatest = 2")
    for _ in range(2):
        before = scan(tmp_path, before, is_at_once=False)
    assert before[0].file.versions.latest == 2 and not before[0].file_problem


def test_thousands_of_versions_and_many_models_are_found(tmp_path: Path) -> None:
    for number in range(2000):
        put(tmp_path / "many" / str(number), "many")
    for number in range(300):
        put(tmp_path / f"m{number}", f"m{number}")
    models = scan(tmp_path)
    assert len(models) == 301
    assert versions(models)["many"] == [str(number) for number in range(2000)]


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


def test_a_folder_of_models_that_cannot_be_read_is_named(tmp_path: Path, deny: Any) -> None:
    deny(os, "scandir", tmp_path)
    with pytest.raises(BundleError, match=f"{tmp_path}: Permission denied"):
        scan(tmp_path)


def test_a_models_folder_that_cannot_be_read_is_as_it_was(tmp_path: Path, deny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("known", "new", "other"):
        put(tmp_path / name / "1", name)
    (tmp_path / "lost+found").mkdir()
    before = [model for model in scan(tmp_path) if model.name != "new"]
    for name in ("known", "new", "lost+found"):
        deny(os, "scandir", tmp_path / name)
    after = scan(tmp_path, before)
    assert versions(after) == {"known": ["1"], "new": [], "other": ["1"]}
    assert [model.problem for model in after] == [
        *(f"{tmp_path}/{name}: cannot be read: Permission denied" for name in ("known", "new")),
        "",
    ]
    monkeypatch.undo()
    assert scan(tmp_path, after) == scan(tmp_path)


def test_a_version_that_cannot_be_read_is_found_and_becomes_another_when_it_can(
    tmp_path: Path, deny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    deny(folders, "read_bounded", tmp_path / "en-de" / "1" / "bundle.json")
    closed = scan(tmp_path)
    assert versions(closed) == {"en-de": ["1"]} and closed[0].versions[0].model == ""
    assert scan(tmp_path, closed) == closed
    monkeypatch.undo()
    (model,) = scan(tmp_path, closed)
    assert model.versions[0].model == "en-de"
    assert model.versions[0].stamp != closed[0].versions[0].stamp


def test_a_version_whose_folder_is_closed_is_found_among_others_and_stays_if_it_was_there(
    tmp_path: Path, deny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    put(tmp_path / "en-de" / "2", "en-de")
    known = scan(tmp_path)
    deny(os, "stat", tmp_path / "en-de" / "2" / "bundle.json")
    assert scan(tmp_path, known) == known
    (model,) = closed = scan(tmp_path)
    assert [(version.name, version.is_closed) for version in model.versions] == [("1", False), ("2", True)]
    monkeypatch.undo()
    assert scan(tmp_path, closed) == known


def test_closed_folders_alone_are_no_model_and_none_beside_a_bundle(tmp_path: Path, deny: Any) -> None:
    put(tmp_path / "flat", "en-de")
    for directory in (tmp_path / "flat" / "tokenizer", tmp_path / "docs" / "private"):
        directory.mkdir(parents=True)
        deny(os, "stat", directory / "bundle.json")
    (model,) = scan(tmp_path)
    assert (model.name, model.problem) == ("en-de", "")


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
def test_what_vanishes_while_it_is_looked_at_is_not_there(
    tmp_path: Path, deny: Any, where: Any, call: str, what: str, left: dict[str, list[str]], is_known: bool
) -> None:
    for version in ("1", "2"):
        put(tmp_path / "en-de" / version, "en-de")
    put(tmp_path / "en-fr" / "1", "en-fr")
    before = scan(tmp_path) if is_known else []
    (tmp_path / "en-de" / "model.toml").write_text("[")
    put(tmp_path / "en-de" / "2", "", '{"name": "en-de", "is_new": true}')
    deny(where, call, tmp_path / what, errno.ENOENT)
    if not what.endswith(".toml"):
        (tmp_path / "en-de" / "model.toml").unlink()
    models = scan(tmp_path, before)
    assert versions(models) == left | {"en-fr": ["1"]}
    assert all(model.problem == "" and model.file_problem == "" for model in models)


def test_a_pipe_in_place_of_a_manifest_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "en-de" / "1").mkdir(parents=True)
    os.mkfifo(tmp_path / "en-de" / "1" / "bundle.json")
    assert versions(scan(tmp_path)) == {"en-de": ["1"]}, "opening it says what it is"


# model.toml


def test_a_changed_file_is_used_at_once_or_when_two_looks_have_found_the_same(tmp_path: Path) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    path = tmp_path / "en-de" / "model.toml"
    path.write_text("[versions]\nlatest = 2")
    before = scan(tmp_path)
    assert before[0].file == ModelFile(versions=Versions(latest=2))
    path.write_text("[versions]\nlatest = 3 # half")
    assert scan(tmp_path, before)[0].file.versions.latest == 3
    seen = scan(tmp_path, before, is_at_once=False)
    assert seen[0].file.versions.latest == 2
    path.write_text("[versions]\nlatest = 33 # now whole")
    again = scan(tmp_path, seen, is_at_once=False)
    assert again[0].file.versions.latest == 2
    settled = scan(tmp_path, again, is_at_once=False)
    assert settled[0].file.versions.latest == 33
    path.unlink()
    gone = scan(tmp_path, settled, is_at_once=False)
    assert gone[0].file.versions.latest == 33
    assert scan(tmp_path, gone, is_at_once=False)[0].file == ModelFile()


def test_a_damaged_file_stops_the_start_by_name(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        put(tmp_path / name / "1", name)
    (tmp_path / "a" / "model.toml").write_text("[versions]\nlast = 1\n[swap]\nmode = 1")
    (tmp_path / "b" / "model.toml").write_text("[")
    models = scan(tmp_path)
    assert versions(models) == {"a": [], "b": [], "c": ["1"]}, "nothing says how they should be served"
    with pytest.raises(ConfigError) as refusal:
        refuse_damaged_files(models)
    lines = str(refusal.value).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [f"{tmp_path}/a/model.toml", "versions.last"],
        [f"{tmp_path}/a/model.toml", "swap.mode"],
        [f"{tmp_path}/b/model.toml", "not a TOML file"],
    ]
    refuse_damaged_files(models[2:])


def test_a_file_damaged_later_leaves_the_old_one_in_use_and_says_so_until_it_is_good(tmp_path: Path) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    path = tmp_path / "en-de" / "model.toml"
    path.write_text("[versions]\nlatest = 2")
    models = scan(tmp_path)
    path.write_text("[versions]\nlatest = 0")
    for _ in range(2):
        models = scan(tmp_path, models)
        assert versions(models) == {"en-de": ["1"]}
        assert models[0].file.versions.latest == 2
        assert models[0].file_problem.startswith(f"{path}: versions.latest: 0")
        assert models[0].problem == ""
    path.write_text("[versions]\nlatest = 4")
    models = scan(tmp_path, models)
    assert (models[0].file.versions.latest, models[0].file_problem) == (4, "")


def test_a_damaged_file_that_is_taken_away_is_forgotten(tmp_path: Path) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    (tmp_path / "en-de" / "model.toml").write_text("[")
    models = scan(tmp_path)
    assert versions(models) == versions(scan(tmp_path, models)) == {"en-de": []}
    (tmp_path / "en-de" / "model.toml").unlink()
    models = scan(tmp_path, models)
    assert (versions(models), models[0].file_problem) == ({"en-de": ["1"]}, "")


@pytest.mark.parametrize("call", ["stat", "read_bounded"])
def test_a_file_that_cannot_be_read_is_used_as_soon_as_it_can(
    tmp_path: Path, deny: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    put(tmp_path / "en-de" / "1", "en-de")
    path = tmp_path / "en-de" / "model.toml"
    path.write_text("[versions]\nlatest = 2")
    before = scan(tmp_path)
    path.write_text("[versions]\nlatest = 3 ")
    deny(os if call == "stat" else model_file, call, path)
    for looks in (before, scan(tmp_path, before)):
        denied = scan(tmp_path, looks)
        assert denied[0].file.versions.latest == 2
        assert denied[0].file_problem == f"{path}: cannot be read: Permission denied"
        assert versions(denied) == {"en-de": ["1"]}
    monkeypatch.undo()
    after = scan(tmp_path, denied)
    assert (after[0].file.versions.latest, after[0].file_problem) == (3, "")


def test_a_file_alone_is_a_model_without_versions(tmp_path: Path) -> None:
    (tmp_path / "en-de").mkdir()
    (tmp_path / "en-de" / "model.toml").write_text("[versions]\nlatest = 2")
    (model,) = scan(tmp_path)
    assert (model.name, model.versions, model.file.versions.latest) == ("en-de", (), 2)


LAYOUTS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "en-de"]),
    st.one_of(
        st.just("flat"),
        st.sets(st.sampled_from(["1", "2", "10", "v1", ".9", "half"]), max_size=4),
    ),
)


@given(LAYOUTS, LAYOUTS)
def test_a_look_finds_the_same_whatever_was_there_before(tmp_path_factory: Any, first: Any, second: Any) -> None:
    folder = tmp_path_factory.mktemp("models")

    def lay(models: Any) -> None:
        for entry in folder.iterdir():
            shutil.rmtree(entry)
        for name, what in models.items():
            if what == "flat":
                put(folder / name, name)
            for version in what if what != "flat" else ():
                put(folder / name / version, name, '{"name": "' if version == "half" else "")

    lay(first)
    before = scan(folder)
    assert versions(before) == {
        name: [""] if what == "flat" else [version for version in ("1", "2", "10", "v1") if version in what]
        for name, what in sorted(first.items())
        if what == "flat" or what - {".9"}
    }
    lay(second)
    assert scan(folder, before) == scan(folder)


# --- files beside the folder of models


def put_files(folder: Path, revision: str, files: dict[str, str]) -> Path:
    """Put files down as the kubelet does with a ConfigMap: links through one link that is exchanged in one step."""
    (folder / revision).mkdir(parents=True)
    for name, text in files.items():
        (folder / revision / name).write_text(text)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..new").symlink_to(revision)
    (folder / "..new").rename(folder / "..data")
    return folder


def test_files_beside_the_models_take_the_place_of_their_own(tmp_path: Path) -> None:
    put(tmp_path / "models/en-de/1", "en-de")
    put(tmp_path / "models/whatever", "en-fr")
    put(tmp_path / "models/ro-de/1", "ro-de")
    for folder in ("en-de", "whatever", "ro-de"):
        (tmp_path / f"models/{folder}/model.toml").write_text("[settings]\nmax_slots = 3")
    files = put_files(
        tmp_path / "files", "..1", {"en-de.toml": "[versions]\nlatest = 2", "en-fr.toml": "[settings]\nmax_slots = 5"}
    )
    models = {model.name: model.file for model in scan(tmp_path / "models", files=files)}
    assert (models["en-de"].versions.latest, models["en-de"].settings.max_slots) == (2, None), "the whole file, not field by field"
    assert models["en-fr"].settings.max_slots == 5, "by the model's name, not its folder's"
    assert models["ro-de"].settings.max_slots == 3
    assert {model.file.settings.max_slots for model in scan(tmp_path / "models")} == {3}


def test_an_exchanged_file_is_read_again_and_one_that_is_gone_leaves_the_models_own(tmp_path: Path) -> None:
    put(tmp_path / "models/en-de/1", "en-de")
    (tmp_path / "models/en-de/model.toml").write_text("[settings]\nmax_slots = 3")
    files = put_files(tmp_path / "files", "..1", {"en-de.toml": "[versions]\nlatest = 2"})
    found = scan(tmp_path / "models", files=files)
    put_files(files, "..2", {"en-de.toml": "[versions]\nlatest = 4"})
    found = scan(tmp_path / "models", found, False, files)
    assert found[0].file.versions.latest == 2, "seen once"
    found = scan(tmp_path / "models", found, False, files)
    assert found[0].file.versions.latest == 4
    put_files(files, "..3", {"en-de.toml": "[versions]\nlatst = 4"})
    found = scan(tmp_path / "models", found, True, files)
    assert found[0].file.versions.latest == 4
    assert found[0].file_problem == f"{files}/en-de.toml: versions.latst: unknown field; did you mean latest?"
    (files / "en-de.toml").unlink()
    found = scan(tmp_path / "models", found, True, files)
    assert (found[0].file.settings.max_slots, found[0].file_problem) == (3, "")


def test_files_that_no_model_is_called_like_are_named(tmp_path: Path) -> None:
    put(tmp_path / "models/en-de/1", "en-de")
    files = put_files(tmp_path / "files", "..1", {"en-de.toml": "", "en_de.toml": "", "en-fr.toml": ""})
    assert find_unused(files, scan(tmp_path / "models", files=files)) == ["en-fr.toml", "en_de.toml"]


def test_without_the_folder_of_files_nothing_is_decided(tmp_path: Path) -> None:
    put(tmp_path / "models/en-de/1", "en-de")
    for missing in (scan, find_models):
        with pytest.raises(BundleError, match=f"^{tmp_path}/files: no such folder$"):
            missing(tmp_path / "models", files=tmp_path / "files")
    (tmp_path / "files").write_text("")
    with pytest.raises(BundleError, match=f"^{tmp_path}/files: not a folder$"):
        scan(tmp_path / "models", files=tmp_path / "files")
