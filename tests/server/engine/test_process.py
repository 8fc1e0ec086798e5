"""The engine's loop on its socket, without a model: how it starts, what it reports and when, how it ends."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from dragoman.extras import install_command
from dragoman.server.engine import process
from dragoman.server.engine.messages import (
    Cancel,
    Command,
    Event,
    Fatal,
    Hello,
    Ready,
    Report,
    Request,
    Score,
    ScoreRequest,
    Snapshot,
    Stop,
    Submit,
    Watch,
)
from dragoman.server.engine.process import EXIT_BROKEN, EXIT_CANNOT_START, EngineLoop
from dragoman.server.engine.scoring import Scoring
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory
from tests.server.engine.bench import Bench, FakeGraphs
from tests.server.engine.test_scoring import FakeScorer

READY = Ready("fake", 2, 0.0)


class StrangeError(Exception):
    """Of no family, like ONNX Runtime's."""


class GatedScorer(FakeScorer):
    """A scorer that works as soon as its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.has_begun, self.failing = threading.Event(), threading.Event(), {666}
        self.on_score = self.wait
        self.gate.set()

    def wait(self) -> None:
        self.has_begun.set()
        assert self.gate.wait(10)

    def check(self) -> None:
        super().check()
        self.wait()


class Attached:
    """An engine loop on a thread, and the front end's side of its socket."""

    def __init__(self, folder: Path) -> None:
        endpoint = f"ipc://{folder}/engine"
        self.bench, self.scorer = Bench(), GatedScorer()
        self.loop = EngineLoop(EngineSettings(endpoint, "bundle", 1, 2, 10, 1000, "error", "json"))
        self.loop._load = self._load  # type: ignore[method-assign]
        self.error: Exception | None = None
        self.code: int | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run)

    def _load(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.bench.engine, Scoring(self.scorer, 1000), READY

    def _run(self) -> None:
        self.code = self.loop.run()

    def start(self, *commands: Command, is_greeted: bool = True) -> None:
        """Run the loop; wait until it is ready if it is greeted, and send commands."""
        self._thread.start()
        if is_greeted:
            self.send(Hello())
            assert self.receive() == READY
        self.send(*commands)

    def send(self, *commands: Command) -> None:
        for command in commands:
            self._socket.send(msgspec.msgpack.encode(command))

    def send_bytes(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> Event:
        assert self._socket.poll(60_000), "nothing came"
        return msgspec.msgpack.decode(self._socket.recv(), type=Event)

    def report(self) -> Report:
        report = self.receive()
        assert isinstance(report, Report)
        return report

    def ends(self, count: int) -> dict[int, str]:
        reasons: dict[int, str] = {}
        while len(reasons) < count:
            report = self.report()
            for end in (*report.finished, *report.scored):
                assert end.id not in reasons
                reasons[end.id] = end.reason
        return reasons

    def end(self) -> int | None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.code

    def close(self) -> None:
        self.scorer.gate.set()
        if self._thread.is_alive():
            self.loop.stop()
            self._thread.join(10)
        self._socket.close()
        self._context.term()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Attached]:
    attached = Attached(tmp_path)
    yield attached
    attached.close()


def pair(number: int, first: int = 5, **fields: Any) -> ScoreRequest:
    return ScoreRequest(number, [first, 1], [4, 1], 0.0, **fields)


def request(number: int, length: int = 3, **fields: Any) -> Request:
    return Request(number, [length, number], 30, 0.0, **fields)


def test_requests_and_pairs_are_answered_until_it_is_told_to_stop(front: Attached) -> None:
    front.start(Submit([request(1)]), Score([pair(2, is_aligned=True), pair(3, 666), pair(4)]))
    assert front.ends(4) == {1: "eos", 2: "eos", 3: "step_failed", 4: "eos"}
    front.send(Stop())
    assert front.end() == 0


def test_steps_without_news_are_told_together_and_tokens_at_once(front: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report for each step would wake the front end between any two, and take its cores from the model."""
    monkeypatch.setattr(process, "REPORT_SECONDS", 1_000_000)
    front.start(Submit([request(1, 300)]))
    report = front.report()
    (end,) = report.finished
    assert end.num_generated == len(report.statistics.steps) == 30 and report.statistics.num_running == 0
    assert [prefill.num_rows for prefill in report.statistics.prefills] == [1]
    front.send(Submit([request(2, 300, is_streamed=True)]))
    assert [len(tokens.token_ids) for _ in range(30) for tokens in front.report().tokens] == [1] * 30
    monkeypatch.setattr(process, "REPORT_SECONDS", 0.0)
    front.send(Submit([request(3, 300)]))
    assert [len(front.report().statistics.steps) for _ in range(30)] == [1] * 30, "a busy engine reports now and then"


def test_a_snapshot_is_sent_once_for_each_time_it_is_asked_for(front: Attached) -> None:
    def events_until(kind: type[Event]) -> list[Event]:
        events = [front.receive()]
        while not isinstance(events[-1], kind):
            events.append(front.receive())
        return events

    front.start(Watch())
    events_until(Snapshot)
    front.send(Submit([request(1)]))
    assert front.ends(1) == {1: "eos"}
    front.send(Watch())
    events = events_until(Snapshot)
    front.send(Stop())
    assert front.end() == 0
    while front._socket.poll(50):
        events.append(front.receive())
    (snapshot,) = [event for event in events if isinstance(event, Snapshot)]
    assert snapshot.engines[0].slots == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StrangeError("model is odd"), "StrangeError: model is odd"),
        (ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime"), install_command("cpu")),
        (OutOfDeviceMemory("cudaMalloc: out of memory"), "to load it (cudaMalloc: out of memory): lower max_slots"),
        (MemoryError(), "not enough memory to load it: lower max_slots"),
        (DeviceError("--device cuda: CUDA runs fp16 and bf16 bundles"), "--device cuda: CUDA runs fp16"),
    ],
)
def test_the_reason_against_a_start_is_told(
    front: Attached, capsys: pytest.CaptureFixture[str], error: Exception, reason: str
) -> None:
    front.error = error
    front.start(Hello(), is_greeted=False)
    fatal = front.receive()
    assert isinstance(fatal, Fatal) and reason in fatal.reason
    assert front.end() == EXIT_CANNOT_START
    output = capsys.readouterr()
    assert ("Traceback" in output.out + output.err) is isinstance(error, StrangeError)


@pytest.mark.parametrize("frames", [(b"",), (b"one", b"too many")])
def test_a_message_that_cannot_be_read_breaks_the_engine_in_order(front: Attached, frames: tuple[bytes, ...]) -> None:
    front.start(is_greeted=False)
    front.send_bytes(*frames)
    assert front.end() == EXIT_BROKEN


@pytest.mark.parametrize(("last", "code"), [(msgspec.msgpack.encode(Stop()), 0), (b"\xc1", EXIT_BROKEN)])
def test_what_runs_and_waits_at_the_end_is_told_and_not_waited_for(front: Attached, last: bytes, code: int) -> None:
    has_sent = threading.Event()
    front.bench.runner.on_step = lambda: has_sent.wait(60)
    front.scorer.gate.clear()
    front.start(Score([pair(1), pair(2)]))
    assert front.scorer.has_begun.wait(10)
    front.send(Submit([request(i, 1000) for i in range(3, 11)]), Cancel([3, 99]))
    front.send_bytes(last)
    has_sent.set()
    reasons = front.ends(2 + 8 if code == 0 else 2)
    assert {reasons.pop(i) for i in (1, 2)} == {"draining"}
    if code == 0:
        assert reasons.pop(3) == "cancelled" and set(reasons.values()) == {"draining"}
    assert front.end() == code
    assert front.scorer.calls[-1] == "interrupt" and front.loop.is_computing


def test_a_pair_holds_up_neither_requests_nor_signs_of_life_and_can_be_cancelled(
    front: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_MILLISECONDS", 10)
    front.scorer.gate.clear()
    front.start(Score([pair(1), pair(2)]))
    assert front.scorer.has_begun.wait(10)
    front.send(Submit([request(3), request(4)]))
    assert front.ends(2) == {3: "eos", 4: "eos"}
    for _ in range(3):
        report = front.report()
        assert not report.scored
        assert (report.statistics.num_waiting, report.statistics.num_waiting_tokens) == (2, 8)
    front.send(Cancel([1]))
    assert front.ends(1) == {1: "cancelled"}
    front.scorer.gate.set()
    assert front.ends(1) == {2: "eos"}


@pytest.mark.parametrize("is_scorer_broken", [False, True])
def test_steps_are_captured_while_nothing_runs(front: Attached, monkeypatch: pytest.MonkeyPatch, is_scorer_broken: bool) -> None:
    monkeypatch.setattr(process, "QUIET_SECONDS", 0.001)
    front.bench.runner.graphs = graphs = FakeGraphs(5, StrangeError("made to fail"), 2)  # type: ignore[assignment]
    if is_scorer_broken:
        front.scorer.is_loaded, front.scorer.faults = False, {"check": DeviceError("the bundle is away")}
    front.start()
    assert graphs.all_done.wait(60)
