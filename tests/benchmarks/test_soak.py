"""The parts of the soak: its callers against a real server, what is watched, and what is said of it."""

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.cut_line import CutLine
from benchmarks.harness.replica import Replica
from benchmarks.soak.callers import Callers, Count
from benchmarks.soak.kills import Victim, kill, victims, watched
from benchmarks.soak.main import wait_idle
from benchmarks.soak.references import SEARCHES, References
from benchmarks.soak.soaked import IDLE, RESTARTS, Soaked, verdicts
from benchmarks.soak.watch import MEASURES, Reading, Watch, read, slope, trend
from dragoman.v1 import generation_pb2

TEXTS = ("a dog runs", "two men stand on a ladder")


def readings(values: list[float]) -> list[Reading]:
    return [Reading(float(at), dict.fromkeys(MEASURES, value)) for at, value in enumerate(values)]


def test_every_kind_of_misuse_ends_as_it_should_and_leaves_nothing(endless: tuple[Path, Path]) -> None:
    async def ask(address: str) -> tuple[dict[str, Count], References]:
        callers, stopping = Callers(address, TEXTS), asyncio.Event()
        async with References(address, TEXTS) as references:
            await references.translate()
            running = asyncio.create_task(callers.run(60.0, stopping))
            while any(count.ended.total() < 1 for count in callers.counts.values()):
                await asyncio.sleep(0.05)
            stopping.set()
            await running
            await references.translate()
        return callers.counts, references

    with Replica(endless[1], "--num-threads=1", "--warmup=false") as replica:
        replica.start()
        counts, references = asyncio.run(asyncio.wait_for(ask(replica.address), 60))
        after = wait_idle(replica)
        assert replica.terminate() == 0
    assert not {kind: count.unexpected for kind, count in counts.items() if count.unexpected}
    assert all(count.num_lost == 0 for count in counts.values())
    assert [after[name] for name in (*IDLE, RESTARTS)] == [0.0] * 4
    assert (references.num_translated, references.num_different) == (2 * len(TEXTS) * len(SEARCHES), 0)
    assert not references.failures


def test_a_reference_that_changes_is_noticed_and_its_times_are_not() -> None:
    references = References("127.0.0.1:1", TEXTS)
    response = generation_pb2.GenerateResponse(request_id="a", text="x", timings=generation_pb2.Timings(total_seconds=1.0))
    references.compare(response)
    references.compare(generation_pb2.GenerateResponse(request_id="a", text="x", timings=generation_pb2.Timings(total_seconds=2.0)))
    assert references.num_different == 0
    references.compare(generation_pb2.GenerateResponse(request_id="a", text="y"))
    assert (references.num_translated, references.num_different) == (3, 1)


def test_a_reference_without_an_answer_is_counted() -> None:
    async def ask() -> References:
        async with References("127.0.0.1:1", TEXTS) as references:
            await references.translate()
        return references

    references = asyncio.run(ask())
    assert references.failures == Counter({"UNAVAILABLE": len(TEXTS) * len(SEARCHES)})


def test_a_line_forwards_until_it_is_cut() -> None:
    async def talk() -> tuple[bytes, bytes]:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(100):
                writer.write(data)
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with CutLine(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as line:
            host, _, port = line.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"hello")
            heard = await reader.readexactly(5)
            line.cut()
            try:
                rest = await asyncio.wait_for(reader.read(), 5)
            except ConnectionError:
                rest = b""
            writer.transport.abort()
        server.close()
        return heard, rest

    assert asyncio.run(talk()) == (b"hello", b"")


def test_a_process_is_read_as_it_is() -> None:
    found = read(os.getpid(), 1.0)
    assert found.values["resident MB"] > 5 and found.values["descriptors"] >= 3 and found.values["threads"] >= 1
    with pytest.raises(OSError):
        read(2**22 + 1, 0.0)


def test_a_watch_reads_again_and_again_and_says_what_it_could_not() -> None:
    with Watch({"me": os.getpid(), "nobody": 2**22 + 1}, 0.01) as watch:
        while len(watch.readings["me"]) < 3:
            time.sleep(0.01)
    assert watch.readings["nobody"] == [] and len(watch.failures) >= 2
    assert "nobody" in watch.failures[0]


def test_growth_after_the_warm_up_is_noticed() -> None:
    flat = trend(readings([10.0] * 10 + [100.0] * 30), "resident MB")
    assert flat.is_flat and flat.per_hour == pytest.approx(0.0)
    grown = trend(readings([100.0 + at for at in range(40)]), "resident MB")
    assert not grown.is_flat and grown.per_hour == pytest.approx(3600.0)
    assert not trend(readings([20.0] * 20 + [25.0] * 20), "descriptors").is_flat
    assert trend(readings([20.0] * 20 + [19.0] * 20), "threads").is_flat


def test_too_few_readings_are_no_trend() -> None:
    with pytest.raises(ValueError, match="too few"):
        trend(readings([1.0] * 5), "threads")
    assert slope([1.0, 1.0], [1.0, 5.0]) == 0.0


def soaked(**changes: Any) -> Soaked:
    """Return a soak in which nothing went wrong, but for what is changed."""
    count = Count(frozenset({"OK"}), 3, Counter({"OK": 3}))
    metrics = dict.fromkeys((*IDLE, RESTARTS), 0.0)
    clean = Soaked(
        capacity={"greedy": 10.0},
        counts={"score": count},
        num_compared=4,
        trends={("engine", measure): trend(readings([5.0] * 40), measure) for measure in MEASURES},
        before=metrics | {"dragoman_request_success_total": 10.0},
        after=metrics | {"dragoman_request_success_total": 17.0},
    )
    return replace(clean, **changes)


def test_a_clean_soak_keeps_every_promise() -> None:
    assert all(kept for kept, _ in verdicts(soaked()))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"counts": {"score": Count(frozenset({"OK"}), 4, Counter({"OK": 3}))}}, "never ended: 1"),
        ({"counts": {"score": Count(frozenset({"OK"}), 4, Counter({"OK": 3, "INTERNAL": 1}))}}, "unexpected status: 1"),
        ({"reference_failures": {"UNAVAILABLE": 2}}, "unexpected status: 2"),
        ({"num_different": 1}, "differed: 1"),
        ({"num_compared": 0}, "answers by the server's count"),
        ({"watch_failures": ["engine: gone"]}, "failed readings of processes: 1"),
        ({"trends": {("engine", "threads"): trend(readings([5.0] * 20 + [50.0] * 20), "threads")}}, "engine, threads"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, Any], named: str) -> None:
    broken = [text for kept, text in verdicts(soaked(**changes)) if not kept]
    assert any(named in text for text in broken), broken


@pytest.mark.parametrize("name", [*IDLE, RESTARTS])
def test_what_is_left_over_breaks_a_promise(name: str) -> None:
    found = soaked()
    found.after[name] = 1.0
    assert sum(not kept for kept, _ in verdicts(found)) == 1


def test_one_of_several_is_killed_and_never_the_process_that_was_started() -> None:
    assert victims({"front end": [1], "engine": [2]}, 1) == []
    assert victims({"front end": [1], "engine": [2, 3]}, 1) == [Victim("engine", 3)]
    several = {"front end": [1, 4, 5], "engine": [2, 3]}
    assert victims(several, 1) == [Victim("engine", 3), Victim("front end", 5)]
    assert victims({"front end": [1, 4], "engine": [2]}, 1) == []
    assert watched(several, victims(several, 1)) == {"front end 1": 1, "front end 2": 4, "engine 1": 2}
    assert watched({"front end": [1], "engine": [2]}, []) == {"front end": 1, "engine": 2}


def test_victims_are_killed_in_their_time() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    asyncio.run(kill([Victim("engine", process.pid) for process in processes], 0.02))
    assert [process.wait(30) for process in processes] == [-9, -9]


def test_a_killed_process_excuses_calls_that_it_had_and_nothing_else() -> None:
    unavailable = Count(frozenset({"OK"}), 101, Counter({"OK": 100, "UNAVAILABLE": 1}))
    found = soaked(counts={"score": unavailable}, killed=[Victim("engine", 7), Victim("front end", 8)])
    found.after[RESTARTS] = 1.0
    assert all(kept for kept, _ in verdicts(found))
    assert any("begun: 1, 0.95% of all" in text for _, text in verdicts(found))
    found.counts["score"].ended["UNAVAILABLE"] += 1
    found.counts["score"].num_begun += 1
    (broken,) = [text for kept, text in verdicts(found) if not kept]
    assert broken.startswith("UNAVAILABLE where nobody tried again")
    found.counts["score"].ended.update({"UNAVAILABLE": -1, "INTERNAL": 1})
    assert [text for kept, text in verdicts(found) if not kept] == ["requests that ended with an unexpected status: 1"]
    found = soaked(killed=[Victim("engine", 7)], is_whole=False)
    broken = [text for kept, text in verdicts(found) if not kept]
    assert broken == ["engine restarts: 0, engines killed: 1", broken[1]] and "as many processes" in broken[1]
