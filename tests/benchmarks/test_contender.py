"""Who can take part, and what is sent to whom."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.load import Outcome, Record
from benchmarks.peers.sender import Order
from benchmarks.peers.server import KINDS
from benchmarks.serving import contender as contender_module
from benchmarks.serving.contender import NAMES, Contender, Gauge, Models, missing
from benchmarks.serving.goodput import rate_of

INSTALL = "pip install '.[cpu,dev,benchmark]'"


def install(environments: Path, name: str) -> None:
    """Put an interpreter where a peer's is."""
    python = environments / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()


def test_dragoman_lacks_nothing(tmp_path: Path) -> None:
    assert missing("dragoman", tmp_path) is None


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_peer_without_its_environment_is_told_how_to_make_it(name: str, tmp_path: Path) -> None:
    assert missing(name, tmp_path) == f"benchmarks/peers/setup.sh {tmp_path} {name}"


@pytest.mark.parametrize(("name", "client"), [("triton", "grpc_tools"), ("mosec", "aiohttp"), ("litserve", "aiohttp")])
def test_a_peer_needs_its_client_and_the_converter(name: str, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, name)
    there = {client, "ctranslate2"}
    monkeypatch.setattr(contender_module, "find_spec", lambda package: ModuleSpec(package, None) if package in there else None)
    assert missing(name, tmp_path) is None
    for package in (client, "ctranslate2"):
        there.remove(package)
        assert missing(name, tmp_path) == INSTALL
        there.add(package)


def test_contenders_tell_what_they_run_with() -> None:
    models = Models("m", Path("b"), Path("c"), "fp32")
    assert Contender(None, models, Path("e")).describe(None) == "defaults"
    assert Contender(None, models, Path("e"), ("--max-slots", "32")).describe(None) == "--max-slots 32"
    assert [Contender(kind, models, Path("e")).name for kind in (None, *KINDS)] == [*NAMES]


def outcomes(*codes: str) -> Record:
    return Record([Outcome(i, i, i + 0.1 * (i + 1), code) for i, code in enumerate(codes)], 0.1, 1.0)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[Order]:
    """What was sent."""
    sent: list[Order] = []

    def run(order: Order) -> Record:
        sent.append(order)
        return outcomes("OK", "OK", "OK")

    monkeypatch.setattr(contender_module, "run", run)
    return sent


def test_all_servers_get_the_same_arrivals(orders: list[Order]) -> None:
    gauge = Gauge(["a", "b"], 10.0, 1.0)
    for face in ("dragoman", "http"):
        gauge.point(face, f"{face}:1", 20, 0.5, 2)
    first, second = (order.load for order in orders)
    assert (first.rate, first.seconds, first.seed, first.texts) == (second.rate, second.seconds, second.seed, second.texts)
    assert first.rate == rate_of(20) and first.address == "dragoman:1"
    gauge.point("http", "x", 20, 0.5, 3)
    gauge.point("http", "x", 21, 0.5, 2)
    assert len({order.load.seed for order in orders[1:]}) == 3


def test_unloaded_latency_is_a_median(orders: list[Order]) -> None:
    assert Gauge(["a"], 10.0, 1.0).unloaded_seconds("http", "x") == pytest.approx(0.2)
    assert orders[0].load.rate is None and orders[0].load.concurrency == 1


def test_a_request_that_fails_without_load_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(order: Order) -> Any:
        return outcomes("OK", "HTTP 500")

    monkeypatch.setattr(contender_module, "run", run)
    with pytest.raises(RuntimeError, match="a request to x without any other ended with HTTP 500"):
        Gauge(["a"], 10.0, 1.0).unloaded_seconds("http", "x")
