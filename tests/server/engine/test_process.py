"""The engine's loop on its socket, without a model: how it starts, what it reports and when, how it ends."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

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
    Stop,
    Submit,
)
from dragoman.server.engine.process import EXIT_BROKEN, EXIT_CANNOT_START, EngineLoop
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.scoring import Scoring
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.engine.snapshot import Snapshot, Watch
from dragoman.server.runtime.device.device import DeviceError, OutOfDeviceMemory
from tests.server.engine.bench import Bench

READY = Ready("fake", 2, 0.0)


class StrangeError(Exception):
    """Of no family, like ONNX Runtime's."""


class FakeScorer:
    """Scores by length, as soon as its gate is open."""

    is_on_device = False

    def __init__(self, is_loaded: bool = True) -> None:
        self.is_loaded = is_loaded
        self.check_error: Exception | None = None
        self.gate, self.has_begun, self.was_interrupted = threading.Event(), threading.Event(), threading.Event()
        self.gate.set()

    def check(self) -> None:
        if self.check_error is not None:
            raise self.check_error
        self.has_begun.set()
        assert self.gate.wait(10)

    def open(self) -> None:
        self.is_loaded = True

    def interrupt(self) -> None:
        self.was_interrupted.set()

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], *_: Any
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.has_begun.set()
        assert self.gate.wait(10)
        if source_ids[0] == 666:
            raise StrangeError("made to fail")
        return np.full(len(target_ids), -0.5, np.float32), np.ones((len(target_ids), len(source_ids)), np.float32)


class Attached:
    """An engine loop on a thread, and the front end's side of its socket."""

    def __init__(self, folder: Path) -> None:
        endpoint = f"ipc://{folder}/engine"
        self.bench, self.scorer = Bench(), FakeScorer()
        self.loop = EngineLoop(EngineSettings(endpoint, "bundle", 1, 2, 10, 1000, 1000, False, "error", "json"))
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
        return self.bench.engine, Scoring(self.scorer, Limits(2, 10, 1000, 1000)), READY

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
        """Read reports until so many requests have ended."""
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
    front.start(Submit([request(1, 300)]), is_greeted=False)
    first, last = front.report(), front.report()
    assert [prefill.num_rows for prefill in first.statistics.prefills] == [1] and not last.statistics.prefills
    assert (first.statistics.num_running, last.statistics.num_running) == (1, 0)
    (end,) = last.finished
    assert end.num_generated == len(first.statistics.steps) + len(last.statistics.steps) == 30
    front.send(Submit([request(2, 300, is_streamed=True)]))
    assert [len(tokens.token_ids) for _ in range(30) for tokens in front.report().tokens] == [1] * 30


def test_a_busy_engine_reports_now_and_then(front: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "REPORT_SECONDS", 0.0)
    front.start(Submit([request(1, 300)]), is_greeted=False)
    assert [len(front.report().statistics.steps) for _ in range(30)] == [1] * 30


def test_a_snapshot_is_sent_once_for_each_time_it_is_asked_for(front: Attached) -> None:
    gate, stepping = threading.Semaphore(0), threading.Semaphore(0)

    def step() -> None:
        stepping.release()
        assert gate.acquire(timeout=60)

    def snapshot() -> Snapshot:
        while not isinstance(event := front.receive(), Snapshot):
            assert isinstance(event, Report)
        return event

    front.bench.runner.on_step = step
    front.start(Submit([request(1, 20)]))
    counts: list[int] = []
    for _ in range(3):
        assert stepping.acquire(timeout=60)
        front.send(Watch())
        gate.release()
        while not front._socket.poll(2000):
            gate.release()  # the question came when the next step had begun
        (slot,) = snapshot().engines[0].slots
        assert slot.request == 1
        counts.append(slot.num_tokens)
    assert counts[0] < counts[1] < counts[2], "between two steps"
    gate.release(30)
    assert front.ends(1) == {1: "eos"}
    front.send(Watch())
    assert snapshot().engines[0].slots == []
    front.send(Stop())
    assert front.end() == 0
    while front._socket.poll(50):
        front.report()


class FakeGraphs:
    """Steps that are still to be captured, of which one cannot be."""

    def __init__(self) -> None:
        self.num_pending = 5
        self.is_disabled = False
        self.all_done = threading.Event()

    @property
    def has_pending(self) -> bool:
        return self.num_pending > 0

    def capture_next(self) -> None:
        self.num_pending -= 1
        if self.num_pending == 2:
            raise StrangeError("made to fail")
        if not self.num_pending:
            self.all_done.set()


@pytest.mark.parametrize("is_scorer_broken", [False, True])
def test_steps_are_captured_while_nothing_runs(front: Attached, monkeypatch: pytest.MonkeyPatch, is_scorer_broken: bool) -> None:
    monkeypatch.setattr(process, "QUIET_SECONDS", 0.001)
    front.bench.runner.graphs = graphs = FakeGraphs()  # type: ignore[assignment]
    if is_scorer_broken:
        front.scorer.is_loaded, front.scorer.check_error = False, DeviceError("the bundle is away")
    front.start()
    assert graphs.all_done.wait(60)


def test_no_step_is_captured_between_pairs(front: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a pair wakes the loop without a message, which is not yet a quiet moment."""
    monkeypatch.setattr(process, "QUIET_SECONDS", 2)
    front.bench.runner.graphs = graphs = FakeGraphs()  # type: ignore[assignment]
    front.start()
    for number in range(1, 11):
        front.send(Score([pair(number)]))
        assert front.ends(1) == {number: "eos"}
    assert graphs.num_pending == 5


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


def test_a_step_that_fails_outside_the_model_breaks_the_engine_in_order(front: Attached) -> None:
    front.bench.engine._compact = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    front.start(Submit([request(1)]), is_greeted=False)
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
    assert front.scorer.was_interrupted.is_set() and front.loop.is_computing


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


def test_requests_are_answered_while_the_scorer_is_loaded(front: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_MILLISECONDS", 1_000_000)
    front.scorer.is_loaded = False
    front.scorer.gate.clear()
    front.start(is_greeted=False)
    assert front.scorer.has_begun.wait(10), "before anything has come"
    front.send(Score([pair(1)]), Submit([request(2)]))
    assert front.ends(1) == {2: "eos"}
    front.scorer.gate.set()
    assert front.ends(1) == {1: "eos"}, "the end of a pair wakes the loop"
