"""The engine's loop on its socket, without a model: how it starts, what it says, how it ends."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
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

READY = Ready("fake", 2, 0.0)


class Attached:
    """An engine loop on a thread, and the front end's side of its socket."""

    def __init__(self, folder: Path, load: Callable[[], Any]) -> None:
        endpoint = f"ipc://{folder}/engine"
        self.loop = EngineLoop(EngineSettings(endpoint, "bundle", 1, 2, 10, 1000, 1000, False, "error", "json"))
        self.loop._load = load  # type: ignore[method-assign]
        self.code: int | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.code = self.loop.run()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        self._socket.send(msgspec.msgpack.encode(command))

    def send_bytes(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> Event:
        assert self._socket.poll(60_000), "nothing came"
        return msgspec.msgpack.decode(self._socket.recv(), type=Event)

    def ends(self, count: int) -> dict[int, str]:
        """Read reports until so many requests have ended."""
        reasons: dict[int, str] = {}
        while len(reasons) < count:
            report = self.receive()
            assert isinstance(report, Report)
            for end in (*report.finished, *report.scored):
                assert end.id not in reasons
                reasons[end.id] = end.reason
        return reasons

    def end(self) -> int | None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.code

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.stop()
            self._thread.join(10)
        self._socket.close()
        self._context.term()


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Callable[[Callable[[], Any]], Attached]]:
    made: list[Attached] = []

    def make(load: Callable[[], Any]) -> Attached:
        made.append(Attached(tmp_path, load))
        made[-1].start()
        return made[-1]

    yield make
    for attached in made:
        attached.close()


class FakeScorer:
    """Scores by length, as soon as it may."""

    is_on_device = False

    def __init__(self, is_loaded: bool = True) -> None:
        self.is_loaded = is_loaded
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()
        self.was_interrupted = threading.Event()

    def check(self) -> None:
        self.has_begun.set()
        assert self.gate.wait(10)

    def open(self) -> None:
        self.is_loaded = True

    def interrupt(self) -> None:
        self.was_interrupted.set()

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], layer: int | None = None, decoder_start_id: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.has_begun.set()
        assert self.gate.wait(10)
        if source_ids[0] == 666:
            raise StrangeError("made to fail")
        return np.full(len(target_ids), -0.5, np.float32), np.ones((len(target_ids), len(source_ids)), np.float32)


def scoring(scorer: FakeScorer | None = None) -> Scoring:
    return Scoring(scorer or FakeScorer(), Limits(2, 10, 1000, 1000))


def pair(number: int, first: int = 5, **fields: Any) -> ScoreRequest:
    return ScoreRequest(number, [first, 1], [4, 1], 0.0, **fields)


def request(number: int, length: int = 3) -> Request:
    return Request(number, [length, number], 30, 0.0)


def test_ready_then_answers_then_the_end_it_was_told(make_bench: Any, attach: Any) -> None:
    front = attach(lambda: (make_bench().engine, scoring(), READY))
    front.send(Hello())
    front.send(Submit([request(1), request(2)]))
    assert front.receive() == READY
    assert front.ends(2) == {1: "eos", 2: "eos"}
    front.send(Stop())
    assert front.end() == 0


def test_an_idle_engine_gives_signs_of_life(make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_MILLISECONDS", 10)
    front = attach(lambda: (make_bench().engine, scoring(), READY))
    front.send(Hello())
    assert front.receive() == READY
    for _ in range(3):
        report = front.receive()
        assert isinstance(report, Report) and not report.finished and not report.tokens


def test_what_slots_do_is_told_once_for_each_time_it_is_asked_for(make_bench: Any, attach: Any) -> None:
    bench, gate, stepping = make_bench(), threading.Semaphore(0), threading.Semaphore(0)

    def step() -> None:
        stepping.release()
        assert gate.acquire(timeout=60)

    bench.runner.on_step = step
    front = attach(lambda: (bench.engine, scoring(), READY))
    front.send(Hello())
    assert front.receive() == READY
    front.send(Submit([request(1, 20)]))
    counts: list[int] = []
    for _ in range(3):
        assert stepping.acquire(timeout=60)
        front.send(Watch())
        gate.release()
        event: Event | None = None
        while not isinstance(event, Snapshot):
            if not front._socket.poll(2000):
                gate.release()  # the question came when the next step had begun
                continue
            event = front.receive()
        [slot] = event.engines[0].slots
        assert slot.request == 1
        counts.append(slot.num_tokens)
    assert counts[0] < counts[1] < counts[2], "it is told between two steps"
    gate.release(30)
    assert front.ends(1) == {1: "eos"}
    front.send(Watch())
    while not isinstance(last := front.receive(), Snapshot):
        assert isinstance(last, Report)
    assert last.engines[0].slots == []
    front.send(Stop())
    while front._thread.is_alive():
        front._thread.join(10)
    while front._socket.poll(50):
        assert isinstance(front.receive(), Report), "nobody has asked again"


class FakeGraphs:
    """Steps that are still to be captured."""

    def __init__(self, num_pending: int) -> None:
        self.num_pending = num_pending
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
            self.is_disabled = True
            self.all_done.set()


def test_steps_are_captured_while_nothing_runs(make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "QUIET_SECONDS", 0.001)
    bench, graphs = make_bench(), FakeGraphs(5)
    bench.runner.graphs = graphs
    front = attach(lambda: (bench.engine, scoring(), READY))
    front.send(Hello())
    assert front.receive() == READY
    assert graphs.all_done.wait(60), "one that fails keeps nobody from the others"
    front.send(Submit([request(1)]))
    while not (report := front.receive()).finished:  # type: ignore[union-attr]
        pass
    assert isinstance(report, Report) and report.statistics.are_graphs_disabled
    front.send(Stop())
    assert front.end() == 0


def test_no_step_is_captured_between_pairs(make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a pair wakes the loop without a message, which is not yet a quiet moment."""
    monkeypatch.setattr(process, "QUIET_SECONDS", 2)
    bench, graphs = make_bench(), FakeGraphs(5)
    bench.runner.graphs = graphs
    front = attach(lambda: (bench.engine, scoring(), READY))
    front.send(Hello())
    assert front.receive() == READY
    for number in range(1, 21):
        front.send(Score([pair(number)]))
        assert front.ends(1) == {number: "eos"}
    assert graphs.num_pending == 5


def test_a_scorer_that_cannot_be_loaded_keeps_no_step_from_being_captured(
    make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "QUIET_SECONDS", 0.001)
    bench, graphs = make_bench(), FakeGraphs(5)
    bench.runner.graphs = graphs
    scorer = FakeScorer(is_loaded=False)

    def refuse() -> None:
        raise DeviceError("the bundle is away")

    monkeypatch.setattr(scorer, "check", refuse)
    attach(lambda: (bench.engine, scoring(scorer), READY))
    assert graphs.all_done.wait(60)


def test_steps_without_news_are_told_together(make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report for each step would wake the front end between any two, and take its cores from the model."""
    monkeypatch.setattr(process, "REPORT_SECONDS", 1_000_000)
    front = attach(lambda: (make_bench().engine, scoring(), READY))
    front.send(Submit([request(1, 300)]))
    first, last = front.receive(), front.receive()
    assert isinstance(first, Report) and isinstance(last, Report)
    assert [prefill.num_rows for prefill in first.statistics.prefills] == [1] and not last.statistics.prefills
    assert (first.statistics.num_running, last.statistics.num_running) == (1, 0)
    (end,) = last.finished
    assert end.num_generated == len(first.statistics.steps) + len(last.statistics.steps) == 30
    front.send(Stop())
    assert front.end() == 0


def test_a_busy_engine_speaks_now_and_then(make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "REPORT_SECONDS", 0.0)
    front = attach(lambda: (make_bench().engine, scoring(), READY))
    front.send(Submit([request(1, 300)]))
    reports = [front.receive() for _ in range(30)]
    assert [len(report.statistics.steps) for report in reports if isinstance(report, Report)] == [1] * 30
    front.send(Stop())
    assert front.end() == 0


def test_streamed_tokens_are_told_at_once(make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "REPORT_SECONDS", 1_000_000)
    front = attach(lambda: (make_bench().engine, scoring(), READY))
    front.send(Submit([Request(1, [300, 1], 30, 0.0, is_streamed=True)]))
    reports = [front.receive() for _ in range(30)]
    assert [len(tokens.token_ids) for report in reports if isinstance(report, Report) for tokens in report.tokens] == [1] * 30
    front.send(Stop())
    assert front.end() == 0


def test_what_runs_at_the_end_is_told(make_bench: Any, attach: Any) -> None:
    bench = make_bench()
    has_sent = threading.Event()

    def hold() -> None:
        assert has_sent.wait(60)
        time.sleep(0.1)  # the answers take 3 s from here at the least: the end is read first

    bench.runner.on_step = hold
    front = attach(lambda: (bench.engine, scoring(), READY))
    front.send(Submit([request(i, 1000) for i in range(8)]))
    front.send(Cancel([0, 99]))
    front.send(Stop())
    has_sent.set()
    reasons = front.ends(8)
    assert reasons.pop(0) == "cancelled" and set(reasons.values()) == {"draining"}
    assert front.end() == 0


class StrangeError(Exception):
    """Of no family, like ONNX Runtime's."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StrangeError("model is odd"), "StrangeError: model is odd"),
        (ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime"), install_command("cpu")),
        (
            OutOfDeviceMemory("cudaMalloc: out of memory"),
            "not enough memory to load it (cudaMalloc: out of memory): lower max_slots",
        ),
        (MemoryError(), "not enough memory to load it: lower max_slots"),
        (DeviceError("--device cuda: CUDA runs fp16 and bf16 bundles"), "--device cuda: CUDA runs fp16"),
    ],
)
def test_whatever_prevents_the_start_is_said(
    attach: Any, capsys: pytest.CaptureFixture[str], error: Exception, reason: str
) -> None:
    def load() -> None:
        raise error

    front = attach(load)
    front.send(Hello())
    fatal = front.receive()
    assert isinstance(fatal, Fatal) and reason in fatal.reason
    assert front.end() == EXIT_CANNOT_START
    # Where the front end's one line says everything, the engine says nothing.
    output = capsys.readouterr()
    assert ("Traceback" in output.out + output.err) is isinstance(error, StrangeError)


@pytest.mark.parametrize("frames", [(b"\xc1",), (b"",), (b"one", b"too many")])
def test_a_message_that_cannot_be_read_breaks_the_engine_in_order(make_bench: Any, attach: Any, frames: tuple[bytes, ...]) -> None:
    front = attach(lambda: (make_bench().engine, scoring(), READY))
    front.send_bytes(*frames)
    assert front.end() == EXIT_BROKEN


def test_a_step_that_fails_outside_the_model_breaks_the_engine_in_order(make_bench: Any, attach: Any) -> None:
    bench = make_bench()

    def fail(*_: object) -> None:
        raise StrangeError("made to fail")

    bench.engine._compact = fail
    front = attach(lambda: (bench.engine, scoring(), READY))
    front.send(Submit([request(1)]))
    assert front.end() == EXIT_BROKEN


def test_pairs_are_scored_beside_requests(make_bench: Any, attach: Any) -> None:
    front = attach(lambda: (make_bench().engine, scoring(), READY))
    front.send(Hello())
    front.send(Submit([request(1)]))
    front.send(Score([pair(2), pair(3, 666), pair(4)]))
    assert front.receive() == READY
    assert front.ends(4) == {1: "eos", 2: "eos", 3: "step_failed", 4: "eos"}
    front.send(Stop())
    assert front.end() == 0


def test_an_idle_engine_scores_at_once(make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_MILLISECONDS", 1_000_000)
    front = attach(lambda: (make_bench().engine, scoring(), READY))
    front.send(Score([pair(1, is_aligned=True)]))
    report = front.receive()
    assert isinstance(report, Report)
    (scored,) = report.scored
    assert (scored.id, scored.reason, scored.log_probs) == (1, "eos", [-0.5, -0.5])
    assert np.frombuffer(scored.alignment, np.float32).tolist() == [1.0] * 4
    assert report.statistics.num_waiting == 0
    front.send(Stop())


def test_waiting_pairs_are_told_in_the_statistics_and_can_be_cancelled(make_bench: Any, attach: Any) -> None:
    scorer = FakeScorer()
    scorer.gate.clear()
    front = attach(lambda: (make_bench().engine, Scoring(scorer, Limits(2, 10, 1000, 4)), READY))
    front.send(Score([pair(number) for number in (1, 2, 3)]))
    front.send(Cancel([2]))
    scorer.gate.set()
    reports: list[Report] = []
    while sum(len(report.scored) for report in reports) < 3:
        reports.append(front.receive())
    assert {end.id: end.reason for report in reports for end in report.scored} in (
        {1: "eos", 2: "cancelled", 3: "eos"},
        {1: "eos", 2: "eos", 3: "eos"},  # the cancellation came too late
    )
    assert reports[0].statistics.num_waiting_tokens == 4 * reports[0].statistics.num_waiting > 0
    front.send(Stop())


def test_pairs_that_wait_at_the_end_are_told(make_bench: Any, attach: Any) -> None:
    scorer = FakeScorer()
    scorer.gate.clear()
    front = attach(lambda: (make_bench().engine, Scoring(scorer, Limits(2, 10, 1000, 4)), READY))
    front.send(Score([pair(number) for number in range(4)]))
    front.send(Stop())
    scorer.gate.set()
    reasons = front.ends(4)
    assert set(reasons.values()) == {"eos", "draining"}
    assert front.end() == 0


def test_pairs_of_an_engine_that_breaks_are_told(make_bench: Any, attach: Any) -> None:
    scorer = FakeScorer()
    scorer.gate.clear()
    front = attach(lambda: (make_bench().engine, Scoring(scorer, Limits(2, 10, 1000, 4)), READY))
    front.send(Score([pair(number) for number in range(4)]))
    front.send_bytes(b"\xc1")
    scorer.gate.set()
    assert "draining" in front.ends(4).values()
    assert front.end() == EXIT_BROKEN


@pytest.fixture
def held() -> Iterator[FakeScorer]:
    """A scorer that is at its first pair until the test lets it go on."""
    scorer = FakeScorer()
    scorer.gate.clear()
    yield scorer
    scorer.gate.set()


def test_a_pair_holds_up_neither_requests_nor_signs_of_life(
    make_bench: Any, attach: Any, held: FakeScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_MILLISECONDS", 10)
    front = attach(lambda: (make_bench().engine, scoring(held), READY))
    front.send(Hello())
    assert front.receive() == READY
    front.send(Score([pair(1), pair(2)]))
    assert held.has_begun.wait(10)
    front.send(Submit([request(3), request(4)]))
    assert front.ends(2) == {3: "eos", 4: "eos"}
    for _ in range(3):
        report = front.receive()
        assert isinstance(report, Report) and not report.scored and report.statistics.num_waiting == 2
    held.gate.set()
    assert front.ends(2) == {1: "eos", 2: "eos"}


def test_a_pair_that_is_being_scored_can_be_cancelled(make_bench: Any, attach: Any, held: FakeScorer) -> None:
    front = attach(lambda: (make_bench().engine, scoring(held), READY))
    front.send(Score([pair(1)]))
    assert held.has_begun.wait(10)
    front.send(Cancel([1]))
    assert front.ends(1) == {1: "cancelled"}
    held.gate.set()
    front.send(Score([pair(2)]))
    assert front.ends(1) == {2: "eos"}


@pytest.mark.parametrize(("last", "code"), [((msgspec.msgpack.encode(Stop()),), 0), ((b"\xc1",), EXIT_BROKEN)])
def test_an_engine_does_not_end_later_for_a_pair(
    make_bench: Any, attach: Any, held: FakeScorer, last: tuple[bytes, ...], code: int
) -> None:
    front = attach(lambda: (make_bench().engine, scoring(held), READY))
    front.send(Score([pair(1), pair(2)]))
    assert held.has_begun.wait(10)
    front.send_bytes(*last)
    assert front.ends(2) == {1: "draining", 2: "draining"}
    assert front.end() == code
    assert held.was_interrupted.is_set() and front.loop.is_computing


def test_requests_are_answered_while_the_scorer_is_loaded(make_bench: Any, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_MILLISECONDS", 1_000_000)
    scorer = FakeScorer(is_loaded=False)
    scorer.gate.clear()
    front = attach(lambda: (make_bench().engine, scoring(scorer), READY))
    assert scorer.has_begun.wait(10), "before anything has come"
    front.send(Score([pair(1)]))
    front.send(Submit([request(2)]))
    assert front.ends(1) == {2: "eos"}
    scorer.gate.set()
    assert front.ends(1) == {1: "eos"}
