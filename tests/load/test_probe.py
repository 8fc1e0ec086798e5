"""What is wrong is said before the run, in the server's words, and what a run's failures were after it."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import msgspec
import pytest

from dragoman.client.errors import CallError
from dragoman.load.items import Items
from dragoman.load.plan import Injections, Server
from dragoman.load.probe import probe, probe_items
from dragoman.load.result import read_result
from dragoman.load.run import Run
from dragoman.model.errors import InputError
from tests.load.test_session import ROOT, run

PATIENCE_SECONDS = 60
NOT_LOADED = "model: 'en-xx' is not loaded; loaded: en-de"


@pytest.fixture
def service(fake_server):
    return fake_server.service


def test_the_servers_models_are_found_and_nothing_is_counted(fake_server, make_plan, service) -> None:
    findings = asyncio.run(probe(make_plan(fake_server.address, concurrency=1)))
    assert [model["name"] for model in findings.models] == ["en-de"] and findings.warnings == []
    assert len(service.probes) == 1 and service.requests == []


def test_every_kind_and_every_width_is_tried_as_the_run_would_ask_it(fake_server, make_plan, service) -> None:
    work = {"mix": {"unary": 0.8, "stream": 0.1, "batch": 0.1}, "batch_size": 3, "beams": {1: 0.5, 4: 0.5}, "model": "en-de"}
    server = Server(fake_server.address, token="secret")
    asyncio.run(probe(msgspec.structs.replace(make_plan(concurrency=1, work=work), server=server)))
    assert [request.num_beams for request in service.probes] == [1, 4] * 2 + [1] * 3 + [4] * 3
    assert {request.model for request in service.probes} == {"en-de"}
    assert all(metadata["authorization"] == "Bearer secret" for metadata in service.metadata)


def test_faults_that_are_wanted_are_not_in_the_probe(fake_server, make_plan, service) -> None:
    for name in ("cancel", "deadline", "slow", "malformed"):
        injections = Injections(**{f"{name}_share": 1.0})
        asyncio.run(probe(make_plan(fake_server.address, concurrency=1, injections=injections)))
    assert [request.text.count(" ") for request in service.probes] == [2] * 4


@pytest.mark.parametrize(
    ("code", "words", "kind", "message"),
    [
        (grpc.StatusCode.NOT_FOUND, NOT_LOADED, InputError, "{}: --model: 'en-xx' is not loaded; loaded: en-de (NOT_FOUND)"),
        (grpc.StatusCode.INVALID_ARGUMENT, "do_sample: no", InputError, "{}: --sample: no (INVALID_ARGUMENT)"),
        (grpc.StatusCode.INVALID_ARGUMENT, "target_language: no", InputError, "{}: --to: no (INVALID_ARGUMENT)"),
        (grpc.StatusCode.INVALID_ARGUMENT, "text: too long", InputError, "{}: text: too long (INVALID_ARGUMENT)"),
        (grpc.StatusCode.UNAUTHENTICATED, "who are you?", InputError, "{}: who are you? (UNAUTHENTICATED)"),
        (grpc.StatusCode.INTERNAL, "broken: 0123", CallError, "{}: broken: 0123"),
    ],
)
def test_a_refusal_ends_it_in_the_servers_words(fake_server, make_plan, service, code, words, kind, message) -> None:
    service.refusals = [(code, words)]
    with pytest.raises((InputError, CallError)) as failed:
        asyncio.run(probe(make_plan(fake_server.address, concurrency=1)))
    assert isinstance(failed.value, kind) and str(failed.value) == message.format(fake_server.address)


def test_each_server_is_asked(fake_server, make_plan, service) -> None:
    target = f"ipv4:{fake_server.address},127.0.0.1:1"
    with pytest.raises(CallError, match=r"^127\.0\.0\.1:1: ") as failed:
        asyncio.run(probe(make_plan(target, concurrency=1)))
    assert failed.value.code == "UNAVAILABLE" and len(service.probes) == 1


def test_a_server_that_is_starting_is_waited_for(fake_server, make_plan, service) -> None:
    service.refusals = [(grpc.StatusCode.UNAVAILABLE, "the engine is starting")] * 2
    asyncio.run(probe(make_plan(fake_server.address, concurrency=1)))
    assert len(service.probes) == 3


def test_a_server_that_is_busy_already_is_a_warning(fake_server, make_plan, service) -> None:
    service.refusals = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")] * 5
    findings = asyncio.run(probe(make_plan(fake_server.address, concurrency=1)))
    assert findings.warnings == [f"{fake_server.address} refused calls already before the run: the queue is full"]


def test_one_source_that_is_too_long_is_not_what_is_tried(make_plan, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("a dog\n" + "a very long one " * 50 + "\n")
    plan = make_plan(concurrency=1, work={"texts": str(tmp_path / "texts")})
    assert {len(Items(plan).make(number).requests[0].text) for number in range(16)} != {5}
    assert [item.requests[0].text for item in probe_items(plan)] == ["a dog"]


def test_a_trace_is_tried_with_its_own_calls(make_plan, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at": 1, "text": "a longer text"}\n{"at": 2, "text": "a dog", "num_beams": 7}\n')
    (item,) = probe_items(make_plan(trace=str(tmp_path / "trace")))
    assert (item.requests[0].text, item.requests[0].num_beams) == ("a dog", 7)


def test_a_wrong_model_ends_the_command_at_once(fake_server, service, tmp_path: Path) -> None:
    service.refusals = [(grpc.StatusCode.NOT_FOUND, NOT_LOADED)]
    output = tmp_path / "result.json"
    arguments = ("--model", "en-xx", "--rate", 5, "--duration", 1000, "--output", output)
    out, err = run("--server", fake_server.address, *arguments, code=2)
    assert err == f"dragoman: {fake_server.address}: --model: 'en-xx' is not loaded; loaded: en-de (NOT_FOUND)\n"
    assert out == "" and service.requests == [] and not output.exists()


def test_a_result_that_is_there_already_survives_a_failed_probe(fake_server, service, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("precious")
    service.refusals = [(grpc.StatusCode.INTERNAL, "broken")]
    _, err = run("--server", fake_server.address, "--rate", 5, "--output", tmp_path / "result.json", code=1)
    assert "broken (INTERNAL)" in err and (tmp_path / "result.json").read_text() == "precious"


def test_ctrl_c_ends_the_probe(fake_server, service) -> None:
    service.is_silent.set()
    command = [sys.executable, "-m", "dragoman", "load", "--server", fake_server.address, "--rate", "5", "--timeout", "1000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while not service.probes and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (130, "") and "before the first call" in out and service.requests == []


def test_without_a_probe_nothing_is_asked_but_what_the_run_asks(fake_server, service) -> None:
    service.refusals = [(grpc.StatusCode.NOT_FOUND, NOT_LOADED)]
    run("--server", fake_server.address, "--concurrency", 1, "--requests", 3, "--no-probe")
    assert service.probes == [] and len(service.requests) == 3


def test_a_run_in_which_nothing_succeeds_fails_and_says_why(fake_server, service, tmp_path: Path) -> None:
    service.failures = [grpc.StatusCode.INTERNAL] * 30
    page, output = tmp_path / "page.html", tmp_path / "result.json"
    arguments = ("--concurrency", 2, "--requests", 30, "--output", output, "--report", page)
    out, _ = run("--server", fake_server.address, *arguments, code=1)
    assert "30 × INTERNAL: no" in out and "warning: nothing succeeded" in out
    assert [msgspec.structs.astuple(failure) for failure in read_result(output).errors] == [("INTERNAL", "no", 30)]
    assert "INTERNAL: no</th><td>30</td>" in page.read_text()


def test_a_run_with_some_failures_shows_them(fake_server, service, tmp_path: Path) -> None:
    service.failures = [grpc.StatusCode.INTERNAL] * 2 + [grpc.StatusCode.DATA_LOSS]
    output = tmp_path / "result.json"
    out, _ = run("--server", fake_server.address, "--concurrency", 1, "--requests", 30, "--output", output)
    assert "2 × INTERNAL: no" in out and "1 × DATA_LOSS: no" in out and "nothing succeeded" not in out
    assert [failure.code for failure in read_result(output).errors] == ["INTERNAL", "DATA_LOSS"]


def test_provoked_failures_are_a_success(fake_server, service) -> None:
    service.failures = [grpc.StatusCode.INVALID_ARGUMENT] * 10
    out, _ = run("--server", fake_server.address, "--concurrency", 1, "--requests", 10, "--malformed-share", 1)
    assert "nothing succeeded" not in out and "provoked: INVALID_ARGUMENT 10" in out


def test_malformed_requests_that_are_answered_are_none(fake_server) -> None:
    out, _ = run("--server", fake_server.address, "--concurrency", 1, "--requests", 10, "--malformed-share", 1, code=1)
    assert "10 × MALFORMED_ACCEPTED: a malformed request was answered" in out


def test_metrics_that_cannot_be_read_are_a_warning(fake_server, make_plan) -> None:
    """The port is the one of gRPC, where nobody speaks HTTP/1."""
    run = Run(make_plan(fake_server.address, concurrency=1, max_calls=3), (f"http://{fake_server.address}/metrics",))
    asyncio.run(run.run(lambda run: None))
    (warning,) = (text for text in run.result({}, {}, []).warnings if "--metrics" in text)
    assert warning.startswith(f"--metrics: http://{fake_server.address}/metrics could not be read: ") and warning.isprintable()


def test_figures_are_shown_before_a_file_cannot_be_written(fake_server) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    out, err = run("--server", fake_server.address, "--concurrency", 1, "--requests", 5, "--output", "/dev/full", code=2)
    assert "end to end" in out and err == "dragoman: /dev/full: No space left on device\n"
