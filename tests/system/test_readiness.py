"""A model that cannot be served any more, or never could, beside one that can: what the server says of itself, by `ready_when`."""

import hashlib
import os
import shutil
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dragoman.client.errors import Unavailable
from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client
from dragoman.export.manifest import MANIFEST_FILE, FileEntry, Manifest, content_version
from tests.system.harness.server import wait_until
from tests.system.test_device import start_in_vain
from tests.system.test_front_ends import front_end_pids

pytestmark = pytest.mark.e2e

QUICK = ("--restart-backoff-initial-seconds", "0.1", "--restart-backoff-max-seconds", "0.2")
NO_RETRY = RetryPolicy(max_attempts=1)


@pytest.fixture
def models(endless: Path, tmp_path: Path) -> Path:
    """Copies of `alpha` and `beta` that a test may damage."""
    return shutil.copytree(endless, tmp_path / "models")


def crash_for_good(server: Any, models: Path) -> None:
    """End beta's engine, and have every one that follows find a graph that it cannot use, which front ends do not look at."""

    def engine_pids() -> list[int]:
        return [event["engine_pid"] for event in server.events if event["event"] == "engine ready" and event["model"] == "beta"]

    wait_until(
        lambda: server.metric("dragoman_model_ready", model="beta") == 1, "beta serves, which no rule needs to have waited for"
    )
    graph = models / "beta" / "decoder.onnx"
    graph.write_bytes(bytes(graph.stat().st_size))
    os.kill(engine_pids()[-1], signal.SIGKILL)
    for _ in range(2):
        server.wait_for("engine ended, restarting", model="beta")


def cannot_be_loaded(bundle: Path) -> None:
    """Have a bundle's decoder be no graph, and its manifest agree with that: only the engine can find out."""
    path, graph = bundle / MANIFEST_FILE, b"no graph at all"
    (bundle / "decoder.onnx").write_bytes(graph)
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    entry = FileEntry(len(graph), hashlib.sha256(graph).hexdigest())
    manifest = replace(manifest, files=manifest.files | {"decoder.onnx": entry})
    path.write_bytes(msgspec.json.encode(replace(manifest, version=content_version(manifest))))


def readyz(server: Any) -> int:
    try:
        with urllib.request.urlopen(f"{server.metrics_address}/readyz", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("flags", "is_ready"),
    [
        ((), True),
        (("--ready-when", "all"), False),
        (("--ready-when", "alpha"), True),
        (("--ready-when", "alpha,beta"), False),
    ],
    ids=["by default", "all", "the one that is well", "both by name"],
)
def test_a_model_that_crashes_again_and_again_takes_away_what_the_rule_says(
    serve: Any, models: Path, flags: tuple[str, ...], is_ready: bool
) -> None:
    with serve(models, *QUICK, *flags) as server, Client(server.address, retry=NO_RETRY) as client:
        assert client.is_ready() and readyz(server) == 200
        crash_for_good(server, models)
        assert client.is_ready() is is_ready and readyz(server) == (200 if is_ready else 503)
        assert client.is_ready("alpha") and not client.is_ready("beta"), "each model speaks for itself, whatever the rule"
        assert server.metric("dragoman_model_ready", model="alpha") == 1
        assert server.metric("dragoman_model_ready", model="beta") == 0
        assert client.generate("a dog runs", model="alpha", max_new_tokens=3).usage.generated_tokens == 3
        with pytest.raises(Unavailable) as caught:
            client.generate("a dog runs", model="beta", max_new_tokens=3)
        assert caught.value.retry_after_seconds
        assert server.terminate() == 0


def test_front_ends_agree_also_one_that_is_started_meanwhile(serve: Any, models: Path) -> None:
    with serve(models, "--front-ends", "2", *QUICK) as server, Client(server.address) as client:
        crash_for_good(server, models)
        os.kill(front_end_pids(server)[0], signal.SIGKILL)
        server.wait_for("front end listens", front_end=0)
        wait_until(lambda: readyz(server) == 200, "the server is ready with both front ends")
        for _ in range(10):  # a connection each, so that both are asked
            with Client(server.address, retry=NO_RETRY) as other:
                assert other.is_ready() and other.is_ready("alpha") and not other.is_ready("beta")
        assert client.generate("a dog runs", model="alpha", max_new_tokens=3).usage.generated_tokens == 3
        assert server.terminate() == 0


@pytest.mark.parametrize(
    "flags",
    [(), ("--replicas", "2"), ("--front-ends", "2"), ("--replicas", "2", "--front-ends", "2")],
    ids=["one engine", "two", "two front ends", "two of each"],
)
def test_a_model_that_is_not_named_is_tried_again_while_the_others_are_served(
    serve: Any, models: Path, flags: tuple[str, ...]
) -> None:
    cannot_be_loaded(models / "beta")
    with serve(models, *QUICK, "--ready-when", "alpha", *flags) as server, Client(server.address) as client:
        for _ in range(2):
            server.wait_for("engine ended, restarting", model="beta")
        assert client.is_ready() and readyz(server) == 200 and not client.is_ready("beta")
        assert client.generate("a dog runs", model="alpha", max_new_tokens=3).usage.generated_tokens == 3
        assert server.terminate() == 0


@pytest.mark.parametrize("rule", ["any", "all", "beta"])
def test_a_model_that_is_needed_and_cannot_be_loaded_stops_the_start(models: Path, rule: str) -> None:
    """So a rollout stops at the first pod, and those that have the last one that could be loaded go on serving."""
    cannot_be_loaded(models / "beta")
    result = start_in_vain(models, "--ready-when", rule)
    assert result.returncode == 1
    [reason] = [line for line in result.stderr.splitlines() if '"event":"cannot serve"' in line]
    assert "model 'beta': the engine cannot start" in reason


def test_a_rule_that_names_a_model_that_is_not_there_is_refused(endless: Path) -> None:
    result = start_in_vain(endless, "--ready-when", "alpha,gamma")
    assert result.returncode == 2
    assert result.stderr == "dragoman: ready_when: there is no model gamma; there are alpha, beta\n"
