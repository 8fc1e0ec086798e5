"""`model.toml`: its fields, errors, and settings before those of the server; names of versions and their order."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.models.model_file import (
    NOT_OF_ENGINES,
    ModelFile,
    ModelSettings,
    check_version_name,
    is_version_name,
    natural_key,
    read_model_file,
)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_text(text: str) -> ModelFile:
        (tmp_path / "model.toml").write_text(text)
        return read_model_file(tmp_path / "model.toml")

    return read_text


TABLES: dict[str, dict[str, Any]] = {
    "versions": {"only": ["3", "4"], "default": "stable"},
    "labels": {"stable": "3", "canary": "4"},
    "weights": {"canary": 0.1, "3": 0.0},
    "settings": {
        **{"num_threads": 2, "replicas": 3, "device": "cpu", "gpu_memory_gib": 2.0, "max_slots": 32, "max_slots_per_request": 8},
        **{"max_waiting_requests": 100, "max_waiting_tokens": 1000, "max_priority": -2, "is_ready_needed": False},
        "one_sentence": True,
        "split": "lines",
        "glossary": "house-style",
        "keep_loaded": "10m",
    },
    "swap": {"mode": "restart", "probation_seconds": 0.0, "max_error_rate": 0.5, "max_latency_factor": 2.0},
}


def test_every_field_is_read_and_an_empty_file_has_the_defaults(read: Any) -> None:
    file = read("")
    assert file == ModelFile() and file.settings == ModelSettings()
    assert (file.versions.num_latest, file.swap.mode) == (1, "replace")
    lines = [
        f"{name} = {json.dumps(fields[name])}" if name else f"[{table}]"
        for table, fields in TABLES.items()
        for name in ("", *fields)
    ]
    file = read("\n".join(lines))
    assert file.model_dump() == ModelFile(**TABLES).model_dump()
    assert file.versions.only == ("3", "4") and file.labels == TABLES["labels"] and file.weights == TABLES["weights"]
    assert file.settings.model_dump() == TABLES["settings"] | {"keep_loaded": 600} and file.swap.model_dump() == TABLES["swap"]
    for table in (file, file.settings, file.swap):
        assert table.model_fields_set == set(type(table).model_fields), "every field was in the text"
    assert read('[settings]\nkeep_loaded = "always"').settings.keep_loaded == math.inf
    assert read("[versions]\nlatest = 3").versions.num_latest == 3
    for weights in ("a = 1", "a = 0.1\nb = 0.2\nc = 0.7", "a = 0", "a = 0.3\nb = 0.3"):
        assert read(f"[weights]\n{weights}").weights


REFUSED = [
    ("[label]\na = '1'", "label: unknown field; did you mean labels?"),
    ("[versions]\nlast = 3", "versions.last: unknown field; did you mean latest?"),
    ("[settings]\nmax_ahead = 3", "settings.max_ahead: is gone: up to 16 waiting requests are encoded ahead"),
    ("[settings]\nmax_slotz = 3", "settings.max_slotz: unknown field; did you mean max_slots?"),
    ("versions = 3", "versions: 3: must be a table"),
    ("[versions]\nlatest = 0", "versions.latest: 0: input should be greater than or equal to 1"),
    ("[versions]\nlatest = 1\nonly = ['1']", "versions: latest and only are both set"),
    ("[versions]\nonly = []", "versions: only names no version"),
    ("[versions]\nonly = '3'", "versions.only: '3': must be a list of names in quotes"),
    ("[versions]\nonly = [3]", "versions.only.0: 3: input should be a valid string"),
    ("[versions]\nonly = ['3', '3']", "versions: only has a version twice"),
    ("[versions]\nonly = ['../3']", 'versions.only.0: "../3" is no name of a version'),
    ("[versions]\ndefault = ''", 'versions.default: "" is no name of a version'),
    ("[labels]\n'a b' = '1'", 'labels.a b: "a b" is no name of a version'),
    ("[labels]\na = 3", "labels.a: 3: input should be a valid string"),
    ("[labels]\na = 'é'", 'labels.a: "\\u00e9" is no name of a version'),
    ("[weights]\na = 0.6\nb = 0.5", "weights: are 1.1 together, more than 1"),
    ("[weights]\na = -0.1", "weights.a: -0.1: input should be greater than or equal to 0"),
    ("[weights]\na = nan", "weights.a: nan: input should be a finite number"),
    ("[weights]\na = '0.1'", "weights.a: '0.1': input should be a valid number"),
    ("[settings]\nnum_threads = -1", "settings.num_threads: -1: input should be greater than or equal to 0"),
    ("[settings]\ndevice = 'gpu'", "settings.device: 'gpu' is not auto, cpu, cuda or cuda:N"),
    ("[settings]\nmax_priority = 11", "settings.max_priority: 11: input should be less than or equal to 10"),
    ("[settings]\nis_ready_needed = 'no'", "settings.is_ready_needed: 'no': input should be a valid boolean"),
    ("[settings]\nkeep_loaded = 600", "settings.keep_loaded: 600 is not a time such as 90s, 10m or 1.5h, in quotes"),
    ("[settings]\nkeep_loaded = '0s'", "settings.keep_loaded: '0s': input should be greater than 0"),
    ("[settings]\nkeep_loaded = 2024-01-01", "settings.keep_loaded: datetime.date(2024, 1, 1) is not a time"),
    ("[swap]\nmode = 'blue'", "swap.mode: 'blue': input should be 'replace' or 'restart'"),
    ("[swap]\nprobation_seconds = inf", "swap.probation_seconds: inf: input should be a finite number"),
    ("[swap]\nmax_error_rate = 2", "swap.max_error_rate: 2: input should be less than or equal to 1"),
    ("[swap]\nmax_latency_factor = 0.9", "swap.max_latency_factor: 0.9: input should be greater than or equal to 1"),
    ("[versions]\nlatest = 2147483648", "versions.latest: 2147483648: input should be less than or equal to 2147483647"),
    ("[settings]\nmax_slots = 18446744073709551616", "settings.max_slots: 18446744073709551616: input should be less than"),
    ("[weights]\na = 0x" + "f" * 5000, "weights.a: a number of too many digits: input should be a valid number"),
    ("a = [", "not a TOML file: "),
    ("a = " + "[" * 50_000, "not a TOML file: nested too deeply"),
    ("#" * 70_000, "cannot be read: more than 65536 bytes"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[text[:30] for text, _ in REFUSED])
def test_error_is_one_line_with_file_and_field(read: Any, tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(text)
    message = str(refusal.value)
    assert message.startswith(f"{tmp_path}/model.toml: {reason}")
    assert "\n" not in message and message.isascii() and len(message) < len(str(tmp_path)) + 600


def test_every_error_is_reported_and_long_values_are_cut(read: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        read("[settings]\nmax_slots = 0\nreplicas = 999\n[swap]\nmode = 3")
    lines = str(refusal.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["settings.replicas", "settings.max_slots", "swap.mode"]
    assert all(line.startswith(f"{tmp_path}/model.toml: ") for line in lines)
    with pytest.raises(ConfigError) as refusal:
        read(f"[settings]\nmax_slots = '{'x' * 10_000}'")
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a = '\xff'", "not a TOML file"),
        (None, "cannot be read: No such file"),
        (..., "cannot be read: not a regular file"),
    ],
)
def test_file_that_cannot_be_read_is_named(tmp_path: Path, content: Any, reason: str) -> None:
    if content is ...:
        os.mkfifo(tmp_path / "model.toml")  # which is not waited for
    elif content is not None:
        (tmp_path / "model.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.toml: {reason}"):
        read_model_file(tmp_path / "model.toml")


SHARED = sorted((ModelSettings.model_fields.keys() & ServerConfig.model_fields.keys()) - NOT_OF_ENGINES)


@pytest.mark.parametrize("name", SHARED)
def test_setting_has_the_constraints_of_the_servers(name: str) -> None:
    """Constraints are compared as JSON schema, in which both say them."""
    server = ServerConfig.model_json_schema()["properties"][name]
    ours = next(branch for branch in ModelSettings.model_json_schema()["properties"][name]["anyOf"] if branch.get("type") != "null")
    words = ("type", "minimum", "maximum", "exclusiveMinimum", "pattern", "minLength")
    assert {word: server.get(word) for word in words} == {word: ours.get(word) for word in words}


def test_settings_of_a_model_go_before_the_servers() -> None:
    server = ServerConfig(models=Path("bundles"), max_slots=64, num_threads=4, replicas=2)
    assert ModelSettings().within(server) == server
    own = ModelSettings(max_slots=8, replicas=1, device="cuda:1", max_priority=3).within(server)
    assert (own.max_slots, own.num_threads, own.replicas, own.device) == (8, 4, 1, "cuda:1")
    assert server.max_slots == 64
    assert len(SHARED) == 8, "every one of them is handed on"
    numbers = {name: 70 + i for i, name in enumerate(SHARED) if name != "device"}
    everything = ModelSettings(device="cpu", **numbers | {"replicas": 7, "max_slots_per_request": 7})
    changed = everything.within(server)
    assert {name: getattr(changed, name) for name in SHARED} == everything.model_dump(include=set(SHARED))


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (ModelSettings(max_slots=8), r"max_slots_per_request \(16\) is more than max_slots \(8\)"),
        (ModelSettings(device="cuda:1"), "replicas are for the CPU, and device is cuda:1"),
        (ModelSettings(num_threads=0), "pin_engines is set without num_threads"),
    ],
)
def test_settings_that_do_not_fit_the_servers_are_refused(own: ModelSettings, reason: str) -> None:
    server = ServerConfig(models=Path("b"), max_slots_per_request=16, replicas=2, num_threads=2, pin_engines=True)
    with pytest.raises(ConfigError, match=reason):
        own.within(server)


@pytest.mark.parametrize(
    "names",
    [
        ["01", "1", "02", "2", "10", "100"],
        ["v1.2", "v1.2.9", "v1.2.10", "v1.10", "v2"],
        ["20231231T2359", "20240105T0000"],
        ["1", "1-rc1", "1.0", "1.0-rc2", "1.0-rc10", "1a", "2"],
        ["3", "2023-12-31", "2024-01-05", "2024-1-6", "A", "B", "a", "a2", "a10", "b1", "v1"],
        ["a1", "a-1", "a-1-2"],
    ],
)
def test_order_of_versions(names: list[str]) -> None:
    assert sorted(random.Random(1).sample(names, len(names)), key=natural_key) == names


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_two_different_names_have_an_order(one: str, other: str) -> None:
    assert (natural_key(one) == natural_key(other)) == (one == other)
    assert (natural_key(one) < natural_key(other)) + (natural_key(other) < natural_key(one)) == (one != other)


NO_NAMES = ["", ".hidden", "-1", "_1", "a b", "a/b", "1\n", "é", "١", "lost+found", "@eaDir", "0" * 65, "a\x00", "\udcff"]


def test_names_of_versions() -> None:
    for name in ("1", "v1.2.10", "2024-01-05", "stable", "A_b", "0" * 64):
        assert is_version_name(name) and check_version_name(name) == name
    for name in NO_NAMES:
        assert not is_version_name(name)
        with pytest.raises(ValueError) as refusal:
            check_version_name(name)
        assert str(refusal.value).isascii() and str(refusal.value).isprintable() and len(str(refusal.value)) < 300
