"""Configuration: where settings come from, how wrong ones are named, and settings that exclude each other."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dragoman.server.config import GONE, ConfigError, ReadyRule, ServerConfig, load, parse_duration
from dragoman.server.service.callers_file import read_book


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("DRAGOMAN_"):
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(overrides: dict[str, Any] | None = None, config_file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load({"models": "bundles"} | (overrides or {}), config_file)
    return str(caught.value)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="models: not set; give --models, DRAGOMAN_MODELS or a line"):
        load({})
    text = 'models = "from-file"\nport = 1\nmax_slots = 1\nnum_threads = 1\nlog_level = "debug"\nhttp_allowed_hosts = ["a", "b"]\n'
    file = write(tmp_path / "dragoman.toml", text)
    monkeypatch.setenv("DRAGOMAN_CONFIG", str(file))
    assert (load({}).port, load({}).http_allowed_hosts) == (1, ("a", "b"))
    monkeypatch.setenv("DRAGOMAN_PORT", "2")
    monkeypatch.setenv("DRAGOMAN_MAX_SLOTS", "2")
    monkeypatch.setenv("DRAGOMAN_HTTP_ALLOWED_HOSTS", "c, d")
    config = load({"port": 3, "num_threads": None})
    assert (config.port, config.max_slots, config.num_threads, config.metrics_port) == (3, 2, 1, 8501)
    assert (config.models, config.log_level, config.http_allowed_hosts) == (Path("from-file"), "debug", ("c", "d"))
    assert load({}, write(tmp_path / "b.toml", 'models = "b"')).models == Path("b"), "a flag names another file"
    config = ServerConfig(models=Path("bundles"))
    assert config.port == 8500, "its constructor reads arguments only"
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 1


def test_settings_are_turned_into_what_is_used() -> None:
    for value, rule in (("any", ReadyRule("any")), ("all", ReadyRule("all")), ("a, b", ReadyRule("", frozenset("ab")))):
        assert load({"models": "bundles", "ready_when": value}).ready_rule == rule
    assert rule.needs("a") and not rule.needs("c")
    for gib, size in ((0, 0), (1e-300, 1), (1.5, 3 * 2**29), (2**20, 2**50)):
        assert load({"models": "bundles", "gpu_memory_gib": gib}).gpu_memory_bytes == size


LOCAL_HOSTS = ["127.0.0.1", "127.8.9.1", "::1", "localhost"]


@pytest.mark.parametrize("host", [*LOCAL_HOSTS, "0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org", "localhost."])
def test_admin_service_that_others_reach_needs_tokens(host: str, tmp_path: Path) -> None:
    if host in LOCAL_HOSTS:
        assert load({"models": "bundles", "admin_port": "0", "admin_host": host}).admin_port == 0
        return
    reason = f"admin_host is {host}, which others may reach, and admin_tokens_file is not set"
    assert refusal({"admin_port": 8502, "admin_host": host}) == reason
    file = write(tmp_path / "operators", "anna:s")
    assert load({"models": "bundles", "admin_port": 8502, "admin_host": host, "admin_tokens_file": file}).admin_host == host


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({}, ("127.0.0.1",) * 3),
        ({"host": "::"}, ("::",) * 3),
        ({"host": "0.0.0.0", "http_host": "10.0.0.1", "metrics_host": "::1"}, ("0.0.0.0", "10.0.0.1", "::1")),
    ],
)
def test_every_port_is_on_the_host_unless_it_has_its_own(settings: dict[str, Any], hosts: tuple[str, ...]) -> None:
    config = load({"models": "bundles", **settings})
    assert (config.host, config.http_host, config.metrics_host) == hosts


BOTH_9 = "port and admin_port are both 9"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"admin_port": 8500}, "port and admin_port are both 8500"),
        ({"admin_port": 8501}, "metrics_port and admin_port are both 8501"),
        ({"admin_port": 9, "port": 9, "host": "127.0.0.1"}, BOTH_9),
        ({"admin_port": 9, "port": 9, "host": "127.0.0.1", "admin_host": "localhost"}, BOTH_9),
        ({"admin_port": 8500, "host": "10.0.0.1"}, None),
        ({"admin_port": 0, "port": 0}, None),
        ({"port": 9000, "metrics_port": 9000}, "port and metrics_port are both 9000"),
        ({"port": 0, "metrics_port": 0}, None),
        ({"max_slots": 8, "max_slots_per_request": 9}, "max_slots_per_request (9) is more than max_slots (8)"),
        ({"max_slots": 8, "max_slots_per_request": 8}, None),
        ({"pin_engines": True}, "pin_engines is set without num_threads, which says how many cores an engine gets"),
        ({"tls_key": ...}, "tls_key is set without tls_certificate"),
        ({"tls_client_ca": ...}, "tls_client_ca is set without tls_certificate and tls_key"),
        ({"metrics_tls_key": ...}, "metrics_tls_key is set without metrics_tls_certificate"),
        ({"http_admin": True}, "http_admin is set without http, or without admin_tokens_file, which says who may administer"),
        (
            {"http_allowed_hosts": ("a:8",)},
            "http_allowed_hosts: 'a:8' is no name of a host, in lower case and without a port (flag --http-allowed-hosts)",
        ),
        ({"zzz": 1}, "zzz: unknown setting (flag --zzz)"),
        ({"tracing_endpoint": "https://[::1]:4317"}, None),
    ],
)
def test_settings_that_exclude_each_other(tmp_path: Path, settings: dict[str, Any], reason: str | None) -> None:
    file = write(tmp_path / "file", "")
    settings = {name: file if value is ... else value for name, value in settings.items()}
    if reason is None:
        config = load({"models": "bundles"} | settings)
        assert {name: getattr(config, name) for name in settings} == settings
    else:
        assert refusal(settings) == reason


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("DRAGOMAN_MAX_SLOT", "3", "DRAGOMAN_MAX_SLOT: unknown setting; did you mean DRAGOMAN_MAX_SLOTS? (environment)"),
        ("DRAGOMAN_PORT", "tcp://10.0.0.1:8500", "enableServiceLinks: false"),
        ("DRAGOMAN_PORT_8500_TCP", "tcp://10.0.0.1:8500", "enableServiceLinks: false"),
        ("DRAGOMAN_TLS_KEY", "", None),
        *((f"DRAGOMAN_{name}", "somewhere", None) for name in ("DATA", "CUDA_STUB", "ADMIN_SERVER", "ADMIN_TOKEN")),
    ],
)
def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str | None) -> None:
    monkeypatch.setenv(name, value)
    if reason is None:
        config = load({"models": "bundles"})
        assert (config.port, config.tls_key) == (8500, None)
    else:
        assert reason in refusal()


def test_a_setting_that_went_is_named_with_what_to_do_wherever_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not GONE.keys() & ServerConfig.model_fields.keys()
    for name, reason in GONE.items():
        assert refusal({name: "1"}) == f"{name}: is gone: {reason} (flag --{name.replace('_', '-')})"
    file = write(tmp_path / "a.toml", "warmup = true\n")
    assert refusal(config_file=file) == f"warmup: is gone: {GONE['warmup']} ({file})"
    monkeypatch.setenv("DRAGOMAN_WARMUP", "true")
    assert refusal() == f"DRAGOMAN_WARMUP: is gone: {GONE['warmup']} (environment)"
    monkeypatch.setenv("DRAGOMAN_WARMUP", "")
    load({"models": "bundles"})


VALUES = {
    "port": ("65536", "-1", "http"),
    "host": ("",),
    "max_slots_per_request": ("-1",),
    "num_threads": ("-1",),
    "drain_seconds": ("-1", "inf"),
    "watchdog_seconds": ("0", "nan"),
    "max_message_bytes": ("10", str(2**31)),
    "device": ("gpu",),
    "gpu_memory_gib": ("-1", "1e300"),
    "log_format": ("xml",),
    "tls_certificate": ("/no/such/file",),
    "ready_when": ("any,en-de",),
    "tracing_endpoint": ("collector:4317", "grpc://collector:4317", "http://collector", "http://a b:1", "http://u:p@c:1"),
    "tracing_sample_ratio": ("1.01",),
}


@pytest.mark.parametrize("name", VALUES)
def test_impossible_value_is_named_with_its_origin(name: str) -> None:
    for value in VALUES[name]:
        message = refusal({name: value})
        assert message.startswith(f"{name}: ") and message.endswith(f"(flag --{name.replace('_', '-')})")
        wanted = {
            "tracing_endpoint": "is not http://HOST:PORT or https://HOST:PORT",
            "ready_when": "is not all, any, or names of models",
        }
        assert wanted.get(name, "") in message


def test_origin_of_a_wrong_variable_and_of_a_wrong_line_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_MAX_SLOTS", "many")
    file = write(tmp_path / "a.toml", "port = 99999\nmax_slot = 3\n")
    port, slots, unknown = refusal(config_file=file).splitlines()
    assert unknown == f"max_slot: unknown setting; did you mean max_slots? ({file})"
    assert port.startswith("port: 99999: ") and port.endswith(f"({file})")
    assert slots.startswith("max_slots: 'many': ") and slots.endswith("(environment, DRAGOMAN_MAX_SLOTS)")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"port = ", "not a TOML file: "),
        (b"port = 1\nport = 2\n", "not a TOML file: "),
        (b"\xff\xfe", "not a TOML file: "),
        (b"models = " + b"[" * 10_000, "not a TOML file: nested too deeply"),
        (b"# " + b"x" * 2**16, "more than 65536 bytes"),
    ],
)
def test_unusable_configuration_file_is_named_in_one_line(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "dragoman.toml"
    if content is not None:
        path.write_bytes(content)
    message = refusal(config_file=path)
    assert message.startswith(f"{path}: {reason}") and "\n" not in message


def test_example_of_the_manual_is_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, and with the settings that it shows as comments."""
    manual = (Path(__file__).resolve().parents[2] / "docs/serve.md").read_text(encoding="utf-8")
    example, callers = re.findall(r"```toml\n(.*?)```", manual, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tls").mkdir()
    for name in ("tls/server.pem", "tls/server.key", "tls/clients.pem", "callers.toml", "scrape-token"):
        write(tmp_path / name, "")
    config = load({}, write(tmp_path / "dragoman.toml", example))
    assert (config.models, config.tls_key, config.tls_client_ca) == (Path("bundles"), Path("tls/server.key"), None)
    whole = load({}, write(tmp_path / "dragoman.toml", re.sub(r"^# ", "", example, flags=re.MULTILINE)))
    assert (whole.tls_client_ca, whole.tracing_sample_ratio) == (Path("tls/clients.pem"), 0.01)
    assert whole.model_fields_set >= {"tracing_endpoint", "auth_tokens_file"}
    book = read_book(write(tmp_path / "callers.toml", callers), has_client_certificates=True)
    assert book.entries["web"].limits.max_requests == 100 and book.entries["nightly"].limits.requests_burst == 20


DURATIONS = {"90s": 90, "10m": 600, "1.5h": 5400, "250ms": 0.25, "2d": 172800, "0s": 0, "007s": 7}
NO_DURATIONS = [
    "",
    "10",
    10,
    "m",
    "-1s",
    "1 s",
    "1S",
    "1e3s",
    "1s ",
    "1s\n",
    "٣s",
    "1.s",
    ".5s",
    "inf",
    "Always",
    "9" * 400 + "s",
    None,
]


@pytest.mark.parametrize("text", [*DURATIONS, *NO_DURATIONS])
def test_durations_have_a_unit(text: str) -> None:
    assert parse_duration("always") == float("inf")
    if text in DURATIONS:
        assert parse_duration(text) == pytest.approx(DURATIONS[text])
        return
    with pytest.raises(ValueError, match=r"is not a time such as 90s, 10m or 1\.5h, in quotes") as refusal:
        parse_duration(text)
    assert len(str(refusal.value)) < 200
