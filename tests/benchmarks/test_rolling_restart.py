"""What is said of restarts and sudden deaths, and the proxy that calls go through."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.haproxy import HAProxy, configuration, find_haproxy
from benchmarks.harness.load_command import run_load
from benchmarks.harness.replica import Replica, free_ports
from benchmarks.rolling_restart import KILLED, ROLLING, Drill, Phase, load_flags, verdicts
from dragoman.load.histogram import Histogram
from dragoman.load.result import Result, SenderResult, TimelineResult, summarise, summarise_group
from dragoman.load.tally import Group


def result(unary: dict[str, int], stream: dict[str, int], num: int = 10) -> Result:
    """Return a report of so many calls of each kind, of which some failed."""
    groups = {
        kind: Group(num=num, num_ok=num - sum(failures.values()), failures=failures)
        for kind, failures in (("unary", unary), ("stream", stream))
    }
    total = Group(times={"e2e": Histogram()})
    for group in groups.values():
        total.merge(group)
    none = summarise(Histogram())
    return Result(
        created="",
        settings={},
        versions={},
        models=[],
        seconds=10.0,
        warmup_seconds=0.0,
        is_interrupted=True,
        slos={},
        total=summarise_group(total, 10.0),
        groups={kind: summarise_group(group, 10.0) for kind, group in groups.items()},
        timeline=TimelineResult(1, []),
        sender=SenderResult(1, num, none, none, 0.1),
    )


def phase(
    event: str, unary: dict[str, int] | None = None, stream: dict[str, int] | None = None, codes: tuple[int, ...] = (0,) * 3
) -> Phase:
    return Phase("haproxy", event, result(unary or {}, stream or {}), [1.0], list(codes))


def is_kept(*phases: Phase) -> list[bool]:
    return [kept for kept, _ in verdicts(phases)]


def test_no_failure_keeps_every_promise() -> None:
    assert is_kept(phase(ROLLING), phase(KILLED, stream={"UNAVAILABLE": 2})) == [True] * 5


def test_each_broken_promise_is_named() -> None:
    assert is_kept(phase(ROLLING, {"UNAVAILABLE": 1})) == [False, True, True]
    assert is_kept(phase(ROLLING, stream={"UNAVAILABLE": 1})) == [True, False, True]
    assert is_kept(phase(ROLLING, codes=(0, 1, 0))) == [True, True, False]
    assert is_kept(phase(KILLED, {"UNAVAILABLE": 1})) == [False, True]
    assert is_kept(phase(KILLED, stream={"UNAVAILABLE": 1, "INTERNAL": 1})) == [True, False]


def test_a_drill_without_calls_proves_nothing() -> None:
    assert verdicts([Phase("haproxy", KILLED, result({}, {}, num=0), [], [])])[0][0] is False


def test_a_row_names_failures_and_times() -> None:
    row = phase(KILLED, {"UNAVAILABLE": 1, "INTERNAL": 2}).row()
    assert row["failed"] == "2 INTERNAL, 1 UNAVAILABLE"
    assert (row["unary"], row["streams failed"], row["p50 ms"]) == (10, "0", "—")


def test_ports_are_free_and_different() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5 and all(0 < port < 65536 for port in ports)


def test_the_proxys_configuration_is_valid(tmp_path: Path) -> None:
    program = find_haproxy()
    if program is None:
        pytest.skip("HAProxy is not installed")
    replicas = [Replica(Path("bundle")) for _ in range(3)]
    text = configuration(*free_ports(2), replicas)
    assert all(text.count(replica.address) == 1 for replica in replicas)
    (tmp_path / "haproxy.cfg").write_text(text, encoding="utf-8")
    done = subprocess.run([program, "-c", "-f", str(tmp_path / "haproxy.cfg")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_restarts_and_a_death_cost_no_call(endless: tuple[Path, Path], tmp_path: Path) -> None:
    """The whole drill, in little: two servers behind a client that balances."""
    (tmp_path / "texts").write_text("a dog runs\ntwo men stand\n", encoding="utf-8")
    flags = [*load_flags(tmp_path / "texts", 20.0, 0.4, 120.0), "--max-new-tokens=45", "--warmup=0"]
    with Replica(endless[1], "--num-threads=1") as one, Replica(endless[1], "--num-threads=1") as other:
        for replica in (one, other):
            replica.start()
        phases = Drill([one, other], flags, 0.5).run("round_robin", f"{one.address},{other.address}")
        assert [found.failures("unary") for found in phases] == [{}, {}]
        assert phases[0].exit_codes == [0, 0]
        assert min(found.result.groups["unary"].counts.num_ok for found in phases) > 0


def test_a_proxy_balances_calls_over_servers(endless: tuple[Path, Path]) -> None:
    program = find_haproxy()
    if program is None:
        pytest.skip("HAProxy is not installed")
    with Replica(endless[1], "--num-threads=1", "--warmup=false") as replica:
        replica.start()
        with HAProxy(program, [replica]) as proxy:
            found = run_load(1.0, f"--server={proxy.address}", "--rate=20", "--words=4", "--max-new-tokens=4", "--warmup=0")
            assert proxy.version().startswith(("2.", "3."))
        assert found.total.counts.num_ok > 0 and not found.total.num_failed
        assert replica.terminate() == 0
