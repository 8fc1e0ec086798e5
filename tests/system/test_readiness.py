"""A model that cannot be served any more, or never could, beside one that can: the server's readiness, by `ready_when`."""

import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dragoman.client.errors import Unavailable
from dragoman.client.sync import Client
from tests.system.conftest import ONE_ENGINE, ONLY_LINUX, TWO_OF_EACH
from tests.system.harness.callers import NO_RETRY
from tests.system.harness.models import seal
from tests.system.harness.server import QUICK_RESTARTS, Event, Server, kill, serving, start_in_vain, wait_until

pytestmark = pytest.mark.e2e

QUICK = ("--num-threads", "1", *QUICK_RESTARTS)
WELL_AND_TWO = ("--ready-when", "alpha", "--front-ends", "2")


@pytest.fixture
def models(endless: Path, tmp_path: Path) -> Path:
    """Copies of `alpha` and `beta` that a test may damage."""
    return shutil.copytree(endless, tmp_path / "models")


def make_unloadable(bundle: Path) -> None:
    """Have a bundle's decoder be no graph, and its manifest agree with that: only an engine can find out."""
    (bundle / "decoder.onnx").write_bytes(b"no graph at all")
    seal(bundle)


def readyz(server: Server) -> int:
    try:
        with urllib.request.urlopen(f"{server.metrics_address}/readyz", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("flags", "is_ready"),
    [
        pytest.param((), True, id="by default"),
        pytest.param(("--ready-when", "all"), False, id="all"),
        pytest.param(WELL_AND_TWO, True, id="the one that is well, of two frontends", marks=ONLY_LINUX),
    ],
)
def test_a_model_that_crashes_again_and_again_takes_away_what_the_rule_says(
    models: Path, flags: tuple[str, ...], is_ready: bool
) -> None:
    with serving(models, *QUICK, *flags) as server, Client(server.address, retry=NO_RETRY) as client:
        server.wait_for_metric(1, "dragoman_model_ready", model="beta")  # no rule needs to have waited for it
        assert client.is_ready() and readyz(server) == 200
        graph = models / "beta" / "decoder.onnx"
        graph.write_bytes(bytes(graph.stat().st_size))  # frontends do not look at it
        kill(*server.engines("beta"))
        for _ in range(2):
            server.wait_for(Event.ENGINE_RESTARTS, model="beta")
        if server.num_frontends > 1:  # also one that is started meanwhile
            kill(server.frontends()[0])
            server.wait_for(Event.FRONTEND_READY, front_end=0)
            wait_until(lambda: readyz(server) == 200, "the server is ready with both frontends")
        for _ in range(10 if server.num_frontends > 1 else 1):  # a connection each, so that both are asked
            with Client(server.address, retry=NO_RETRY) as other:
                assert other.is_ready() is is_ready and readyz(server) == (200 if is_ready else 503)
                assert other.is_ready("alpha") and not other.is_ready("beta"), "each model speaks for itself, whatever the rule"
        with Client(server.address, retry=NO_RETRY) as other:
            assert other.generate("a dog runs", model="alpha", max_new_tokens=3).usage.generated_tokens == 3
            with pytest.raises(Unavailable) as caught:
                other.generate("a dog runs", model="beta", max_new_tokens=3)
        assert caught.value.retry_after_seconds
        assert server.metric("dragoman_model_ready", model="alpha") == 1
        assert server.metric("dragoman_model_ready", model="beta") == 0


@pytest.mark.parametrize("topology", [ONE_ENGINE, TWO_OF_EACH], scope="session")
def test_a_model_that_need_not_be_ready_is_tried_again_while_the_others_are_served(topology: tuple[str, ...], models: Path) -> None:
    make_unloadable(models / "beta")
    with serving(models, *QUICK, "--ready-when", "alpha", *topology) as server, Client(server.address) as client:
        for _ in range(2):
            server.wait_for(Event.ENGINE_RESTARTS, model="beta")
        assert client.is_ready() and readyz(server) == 200 and not client.is_ready("beta")
        assert client.generate("a dog runs", model="alpha", max_new_tokens=3).usage.generated_tokens == 3


@pytest.mark.parametrize("rule", ["any", "all", "beta"])
def test_a_model_that_is_needed_and_cannot_be_loaded_stops_the_start(models: Path, rule: str) -> None:
    """So a rollout stops at the first pod, and those that have the last one that could be loaded go on serving."""
    make_unloadable(models / "beta")
    result = start_in_vain(models, "--num-threads", "1", "--ready-when", rule)
    assert result.returncode == 1
    [reason] = [line for line in result.stderr.splitlines() if f'"event":"{Event.CANNOT_SERVE}"' in line]
    assert "model 'beta': the engine cannot start" in reason
