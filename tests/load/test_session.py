"""The command, with its sender processes, against a server on this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from dragoman.load.result import read_result

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Run `dragoman load` and return standard output and standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    command = [sys.executable, "-m", "dragoman", "load", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_sends_what_was_asked_and_loses_nothing(fake_server, tmp_path: Path, num_processes: int) -> None:
    output = tmp_path / "result.json"
    mix = "unary=0.5,stream=0.3,batch=0.2"
    out, err = run(
        *("--server", fake_server.address, "--arrivals", "constant", "--rate", 200, "--requests", 100, "--mix", mix),
        *("--batch-size", 2, "--duration", 20, "--processes", num_processes, "--output", output, "--token", "secret"),
    )
    result = read_result(output)
    total = result.total.counts
    assert result.sender.num_sent == 100 and result.sender.num_processes == num_processes
    assert total.num == total.num_ok == len(fake_server.service.requests) > 100
    assert len({request.request_id for request in fake_server.service.requests}) == total.num
    assert total.generated_tokens == 4 * total.num
    assert set(result.groups) == {"unary", "stream", "batch"}
    assert sum(piece.num_done for piece in result.timeline.slices) == total.num
    assert result.models[0]["name"] == "en-de"
    assert result.settings["--mix"] == mix and "secret" not in output.read_text()
    assert "end to end" in out and "errors: none" in out
    assert err == ""  # no terminal, no progress


def test_options_reach_the_server_and_are_told_by_their_names(fake_server, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    asked = ("--from", "en", "--to", "de", "--no-sample", "--length-penalty", 0)
    run("--server", fake_server.address, "--rate", 100, "--requests", 2, *asked, "--output", output)
    for request in fake_server.service.requests:
        assert (request.source_language, request.target_language, request.length_penalty) == ("en", "de", 0)
        assert request.HasField("do_sample") and request.HasField("length_penalty")
        assert not (request.do_sample or request.HasField("early_stopping") or request.HasField("top_k"))
    settings = read_result(output).settings
    assert (settings["--from"], settings["--to"], settings["--sample"]) == ("en", "de", "False")


def test_a_server_that_stalls_is_charged_for_everything_that_was_due(fake_server, tmp_path: Path) -> None:
    """No coordinated omission: calls keep coming while the server answers nobody, and all of them have waited."""
    stall = fake_server.service.is_stalled

    def stall_for_a_while() -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not fake_server.service.requests and time.monotonic() < until:
            time.sleep(0.01)
        stall.set()
        time.sleep(1.0)
        stall.clear()

    thread = threading.Thread(target=stall_for_a_while)
    thread.start()
    output = tmp_path / "result.json"
    run("--server", fake_server.address, "--arrivals", "constant", "--rate", 50, "--duration", 2, "--warmup", 0, "--output", output)
    thread.join()
    e2e = read_result(output).total.counts.times["e2e"]
    assert e2e.num == 100
    within = e2e.share_within(0.25)
    assert within is not None and within <= 0.8  # a stall of 1 s has 50 calls in it, of which about 37 wait longer than 0.25 s
    assert e2e.largest >= 0.9


def test_conditions_make_the_run_fail(fake_server, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ("--server", fake_server.address, "--concurrency", 2, "--requests", 20, "--report", page, "--fail-on")
    out, _ = run(*arguments, "errors>0,requests<21", code=3)
    assert "passed: errors>0" in out and "FAILED: requests<21" in out
    assert "requests&lt;21" in page.read_text()
    run(*arguments, "errors>0", code=0)


def test_ctrl_c_ends_the_run_with_a_report_of_what_there_is(fake_server, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "dragoman", "load", "--server", fake_server.address, "--rate", "100", "--duration", "1000"]
    process = subprocess.Popen([*command, "--output", str(output)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while len(fake_server.service.requests) < 20 and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    result = read_result(output)
    assert result.is_interrupted and result.seconds < 100
    assert sum(piece.num_done for piece in result.timeline.slices) == len(fake_server.service.requests) >= 20
    assert "ended before its time" in out


def test_ctrl_c_twice_gives_up_what_is_under_way(fake_server, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    fake_server.service.is_stalled.set()
    command = [
        sys.executable,
        "-m",
        "dragoman",
        "load",
        "--server",
        fake_server.address,
        "--concurrency",
        "3",
        "--duration",
        "1000",
    ]
    arguments = ["--warmup", "0", "--timeout", "1000", "--output", str(output)]
    process = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while len(fake_server.service.requests) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)  # two at once may be delivered as one
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 130
    finally:
        process.kill()
        process.wait()
    assert read_result(output).total.counts.failures == {"UNFINISHED": 3}


def test_a_sweep_tries_rates_and_names_the_knee(fake_server, tmp_path: Path) -> None:
    output, page = tmp_path / "result.json", tmp_path / "report.html"
    fake_server.service.is_stalled.set()  # nothing is answered in time: no rate holds, and rates fall
    arguments = ["--sweep", "--rate", "8", "--duration", "0.5", "--timeout", "0.05", "--slo", "e2e=40ms", "--arrivals", "constant"]
    out, _ = run("--server", fake_server.address, *arguments, "--output", output, "--report", page, "--fail-on", "knee<1", code=1)
    sweep = read_result(output).sweep
    assert sweep is not None and sweep.knee is None
    assert [step.rate for step in sweep.steps[:3]] == [8, 2, 0.5]
    assert (
        "no rate held" in out
        and "FAILED: knee<1 (nothing was measured)" in out
        and "nothing succeeded" in out
        and "Sweep" in page.read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of --rate, --trace and --concurrency"),
        (("--rate", 1, "--concurrency", 1), "one of --rate, --trace and --concurrency"),
        (("--rate", 1, "--warmup", 30), "--warmup"),
        (("--rate", -1), "--rate"),
        (("--rate", 1, "--duration", "inf"), "--duration"),
        (("--concurrency", 1, "--processes", 2), "--concurrency"),
        (("--rate", 1, "--mix", "unary=1,batched=1"), "--mix: batched"),
        (("--rate", 1, "--num-beams", "x"), "--num-beams: x"),
        (("--rate", 1, "--cancel-share", 0.6, "--slow-share", 0.6), "more than 1 together"),
        (("--rate", 1, "--malformed-share", 2), "--malformed-share"),
        (("--rate", 1, "--sweep"), "--slo"),
        (("--concurrency", 1, "--sweep", "--slo", "e2e=1s"), "--sweep goes with --rate"),
        (("--concurrency", 1, "--ramp-to", 2), "--ramp-to go with --rate"),
        (("--rate", 1, "--in", "nowhere"), "nowhere"),
        (("--rate", 1, "--trace", "nowhere"), "nowhere"),
        (("--rate", 1, "--output", "/nowhere/result.json"), "/nowhere/result.json"),
        (("--rate", 1, "--output", "/tmp"), "/tmp"),
        (("--rate", 1, "--in", "/tmp"), "/tmp: Is a directory"),
        (("--rate", 1, "--trace", "/tmp"), "/tmp: Is a directory"),
        (("--rate", 1, "--duration", 0), "--duration"),
        (("--rate", 1, "--timeout", "nan"), "--timeout"),
        (("--rate", 1, "--timeout", "inf"), "--timeout"),
        (("--rate", 1, "--timeout", "1e10"), "--timeout"),
        (("--rate", 1, "--token", "a b"), "--token: must be"),
        (("--rate", 1, "--slo", "e2e=500"), "write 500ms or 500s"),
        (("--rate", 1, "--fail-on", "p95>1"), "write 1ms or 1s"),
        (("--rate", 1, "--num-beams", "1=1e999"), "--num-beams: 1e999"),
        (("--rate", 1, "--batch-size", 10**9), "--batch-size"),
        (("--concurrency", 10**9), "--concurrency"),
        (("--rate", 1, "--key", "client.key"), "--certificate"),
        (("--rate", 1, "--server-name", "a.example"), "--ca"),
        (("--rate", 1, "--ca", "/nowhere/ca.pem"), "/nowhere/ca.pem"),
        (("--rate", 1, "--bogus"), "--bogus"),
        (("--rate", 1, "stray"), "stray"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_sent(arguments, message, monkeypatch, capsys) -> None:
    from dragoman.cli import main as dragoman

    monkeypatch.setattr(sys, "argv", ["dragoman", "load", "--server", "127.0.0.1:1", *map(str, arguments)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        dragoman.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_nobody_there_is_a_failed_call() -> None:
    _, err = run("--server", "127.0.0.1:1", "--rate", 1, code=1)
    assert "UNAVAILABLE" in err


def test_help_lists_the_options_and_costs_other_commands_nothing() -> None:
    out, _ = run("--help")
    assert "--burstiness" in re.sub(r"\x1b\[[0-9;]*m", "", out)
    check = "import sys, dragoman; sys.exit(any(name.startswith('client') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0


def test_the_file_is_json_that_says_what_it_is(fake_server, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    run("--server", fake_server.address, "--concurrency", 1, "--requests", 5, "--output", output)
    content = json.loads(output.read_text())
    assert (content["format"], content["version"]) == ("dragoman-load", 1)
    assert msgspec.to_builtins(read_result(output), str_keys=True) == content
