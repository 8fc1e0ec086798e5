"""`dragoman load` from its options to its exit code, with real sender processes and a server with scripted answers."""

import asyncio
import html
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from dragoman.client.errors import CallError
from dragoman.load.plan import Injections
from dragoman.load.probe import probe
from dragoman.load.result import encode, read_result
from tests.client.fake_server import PATIENCE_SECONDS, failing
from tests.load.conftest import ROOT, LoadService, make_plan, make_result, serving, started
from tests.system.harness.server import wait_until

Run = Callable[..., tuple[int, str, str]]
UNREACHABLE = "127.0.0.1:1"
NOT_LOADED = "model: 'en-xx' is not loaded; loaded: en-de"


def test_a_run_sends_what_was_asked_and_loses_nothing(run_command: Run, server: LoadService, tmp_path: Path) -> None:
    output, mix = tmp_path / "result.json", "unary=0.5,stream=0.3,batch=0.2"
    code, out, err = run_command(
        *("load", "--server", server.address, "--arrivals", "constant", "--rate", 200, "--requests", 100, "--mix", mix),
        *("--batch-size", 2, "--duration", 20, "--processes", 2, "--output", output, "--token", "secret"),
        *("--from", "en", "--to", "de", "--field", "do_sample=false", "--field", "length_penalty=0"),
    )
    assert (code, err) == (0, "")  # no terminal, no progress
    assert "end to end" in out and "errors: none" in out
    result = read_result(output)
    total = result.total.counts
    assert (result.sender.num_sent, result.sender.num_processes) == (100, 2)
    assert total.num == total.num_ok == len(server.requests) > 100 and total.generated_tokens == 4 * total.num
    assert len({request.request_id for request in server.requests}) == total.num
    assert set(result.groups) == {"unary", "stream", "batch"}
    assert sum(piece.num_done for piece in result.timeline.slices) == total.num
    assert result.models[0]["name"] == "en-de" and "secret" not in output.read_text()
    assert {metadata["authorization"] for _, metadata in server.metadata} == {"Bearer secret"}
    for request in server.requests:
        assert (request.source_language, request.target_language, request.length_penalty) == ("en", "de", 0)
        assert request.HasField("do_sample") and request.HasField("length_penalty")
        assert not (request.do_sample or request.HasField("early_stopping") or request.HasField("top_k"))
    asked = {"--mix": mix, "--from": "en", "--to": "de", "--field": "do_sample=false length_penalty=0", "--processes": "2"}
    assert asked.items() <= result.settings.items() and "--token" not in result.settings


# Options, statuses of the first requests, exit code, and texts of the output.
RUNS = {
    "conditions": ("--requests 20 --fail-on errors>0,requests<21", [], 3, ["passed: errors>0", "FAILED: requests<21"]),
    "nothing succeeds": ("--requests 30", ["INTERNAL"] * 30, 1, ["30 × INTERNAL: no", "warning: nothing succeeded"]),
    "some fail": ("--requests 30", ["INTERNAL"] * 2 + ["DATA_LOSS"], 0, ["2 × INTERNAL: no", "1 × DATA_LOSS: no"]),
    "provoked": ("--requests 10 --misbehave malformed=1", ["INVALID_ARGUMENT"] * 10, 0, ["provoked: INVALID_ARGUMENT 10"]),
    "malformed and answered": ("--requests 5 --misbehave malformed=1", [], 1, ["5 × MALFORMED_ACCEPTED: a malformed request"]),
    "only a warm-up": ("--requests 3 --warmup 20", [], 1, ["it ended before the warm-up was over", "no request was counted"]),
    "no metrics": ("--requests 3 --no-probe --metrics {0}", [], 0, ["--metrics: http://{0}/metrics could not be read: "]),
}


@pytest.mark.parametrize(("arguments", "failures", "code", "expected"), RUNS.values(), ids=RUNS)
def test_the_exit_code_and_the_report_tell_how_a_run_ended(
    run_command: Run, server: LoadService, tmp_path: Path, arguments: str, failures: list[str], code: int, expected: list[str]
) -> None:
    server.script.extend(map(failing, failures))
    output, report = tmp_path / "result.json", tmp_path / "page.html"
    asked = ("load", "--server", server.address, "--concurrency", 2, *arguments.format(server.address).split())
    ended, out, err = run_command(*asked, "--output", output, "--report", report)
    assert (ended, err, len(server.probes)) == (code, "", "--no-probe" not in asked)
    page, result = html.unescape(report.read_text()), read_result(output)
    for text in expected:
        assert text.format(server.address) in out.replace("\n", " "), out
    assert ("nothing succeeded" in out) == (code == 1) == ("nothing succeeded" in page)
    checks = [text.split(": ") for text in expected if text.startswith(("passed", "FAILED"))]
    assert [(check.condition, check.is_failed) for check in result.checks] == [(name, how == "FAILED") for how, name in checks]
    assert all(check.condition in page for check in result.checks)
    for failure in result.errors:
        assert f"{failure.code}: {failure.message}</th><td>{failure.num}</td>" in page
    assert {failure.code for failure in result.errors} == {text.split()[2][:-1] for text in expected if " × " in text}


@pytest.mark.parametrize("num_signals", [0, 1, 2], ids=["in the probe", "once", "twice"])
def test_ctrl_c_ends_the_run_with_a_result_and_twice_gives_up_calls(server: LoadService, tmp_path: Path, num_signals: int) -> None:
    output = tmp_path / "result.json"
    for stall in {0: [server.stall_probes], 2: [server.stall]}.get(num_signals, []):
        stall.set()
    arguments = ("--duration", 1000, "--warmup", 0, "--timeout", 1000, "--output", output)
    with started("--server", server.address, "--concurrency", 3, *arguments) as process:
        wait_until(lambda: len(server.requests) >= 3 if num_signals else bool(server.probes), "requests")
        for _ in range(max(1, num_signals)):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)  # two at once may be delivered as one
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (130, "")
    if num_signals == 0:
        assert "before the first call" in out and server.requests == [] and not output.exists()
        return
    result = read_result(output)
    assert "ended before its time" in out and result.is_interrupted and result.seconds < 100
    if num_signals == 1:
        assert sum(piece.num_done for piece in result.timeline.slices) == len(server.requests) >= 3
    else:
        assert result.total.counts.failures == {"UNFINISHED": 3}


def test_ctrl_c_ends_it_before_the_run_while_metrics_are_tried(server: LoadService) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with started("--server", server.address, "--concurrency", 1, "--metrics", address) as process, silent.accept()[0]:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err, server.requests) == (130, "", []) and "before the first call" in out


def test_a_sweep_tries_rates_and_names_the_knee(run_command: Run, server: LoadService, tmp_path: Path) -> None:
    output, page = tmp_path / "result.json", tmp_path / "report.html"
    server.stall.set()  # nothing is answered in time: no rate holds, and rates fall
    arguments = "load --sweep --rate 8 --duration 0.3 --timeout 0.05 --slo e2e=40ms --arrivals constant --fail-on knee<1"
    code, out, _ = run_command(*arguments.split(), "--server", server.address, "--output", output, "--report", page)
    sweep = read_result(output).sweep
    assert code == 1 and sweep is not None and sweep.knee is None
    assert [step.rate for step in sweep.steps] == [8, 2, 0.5, 0.125, 0.03125]
    for expected in ("no rate held", "FAILED: knee<1 (nothing was measured)", "nothing succeeded"):
        assert expected in out
    assert "Sweep" in page.read_text()


# Text of the line of error, and the options that it is for, beside `--rate 1` unless there is another way to send.
WRONG = {
    "one of --rate, --trace and --concurrency": "--rate 1 --concurrency 1 | --no-probe",
    "--rate:": "--rate 0 | --rate nan | --rate inf",
    "--burstiness": "--burstiness 0.5 | --arrivals gamma --burstiness 0",
    "--ramp-to": "--ramp-to 0 | --concurrency 1 --ramp-to 2",
    "--warmup": "--warmup 30 | --warmup -1",
    "--concurrency": "--concurrency 1 --processes 2 | --concurrency 1000000000",
    "--mix": "--mix unary=1,batched=1 | --mix= | --mix unary=0 | --mix unary=x",
    "--num-beams": "--num-beams x | --num-beams 0 | --num-beams 4294967296 | --num-beams 1=1e999",
    "more than 1 together": "--misbehave cancel=0.6,slow=0.6",
    "--misbehave": "--misbehave malformed=2 | --misbehave malformed=-0.1 | --misbehave late=1 | --misbehave slow=1:0s",
    "--misbehave malformed": "--misbehave malformed=1:5ms",
    "--field": "--field text=a | --field beams=1 | --field top_k=x | --field do_sample=perhaps | --field top_p",
    "--slo": "--sweep | --slo p95=1s | --slo e2e | --slo e2e=0s | --slo e2e=5% | --slo e2e=1s,e2e=2s",
    "--slo-share": "--slo-share 0 | --slo-share 101% | --slo-share 5s | --slo-share 1.2.3",
    "--slo e2e: 500: a time needs its unit: write 500ms or 500s": "--slo e2e=500",
    "--fail-on p95: 0.5: a time needs its unit: write 0.5ms or 0.5s": "--fail-on errors>0,p95>0.5",
    "--fail-on p95": "--fail-on p95>5% | --fail-on p95>-1s | --fail-on p95>5m",
    "--fail-on:": "--fail-on errors | --fail-on errors> | --fail-on >1 | --fail-on p33>1 | --fail-on errors=1",
    "--fail-on errors": "--fail-on errors>x | --fail-on errors>5ms | --fail-on errors>1%",
    "--sweep goes with --rate": "--concurrency 1 --sweep --slo e2e=1s | --ramp-to 2 --sweep --slo e2e=1s",
    "--words": "--words 0 | --words x | --words uniform:3 | --words 20000 | --words uniform:9:3 | --words normal:5:-1",
    "--words:": "--words gauss:1:2 | --words lognormal:nan:1 | --words uniform:1:2:3 | --words normal:5:10001",
    "--metrics": "--metrics file:///etc/passwd | --metrics http://",
    "nowhere": "--in nowhere | --trace nowhere | --ca /nowhere/ca.pem | --output /nowhere/result.json",
}


def test_a_wrong_option_is_named_before_anything_is_sent(run_command: Run) -> None:
    for named, rows in WRONG.items():
        for arguments in rows.split("|"):
            rate = [] if any(other in arguments for other in ("--concurrency", "--trace", "--no-probe")) else ["--rate", 1]
            code, out, err = run_command("load", "--server", UNREACHABLE, *rate, *arguments.split())
            assert (code, out, len(err.splitlines())) == (2, "", 1) and named in err, arguments


def test_every_documented_command_is_understood(run_command: Run, server: LoadService, tmp_path: Path, monkeypatch) -> None:
    """One after another; the server refuses the probe, so that nothing else is sent."""
    monkeypatch.chdir(tmp_path)
    for name in ("before.json", "after.json"):
        Path(name).write_bytes(encode(make_result([[0.1] * 5] * 20)))
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "docs/load-testing.md").read_text(encoding="utf-8"), re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert commands[0].startswith("dragoman load ") and sum(line.startswith("dragoman load ") for line in commands) >= 6
    for command in commands:
        name, *words = shlex.split(command, comments=True)
        if name != "dragoman":
            subprocess.run(["bash", "-c", command], check=True)
        elif words[0] == "load":
            server.refusals.append(failing("NOT_FOUND", NOT_LOADED))
            code, _, err = run_command(*words, "--server", server.address)
            assert (code, err) == (1, f"dragoman: {server.address}: --{NOT_LOADED} (NOT_FOUND)\n")
            assert server.probes.pop().model  # `make serve` has several models
        else:
            assert run_command(*words)[0] == 0, command
    assert server.requests == [] and (tmp_path / "difference.html").exists()


def test_metrics_that_cannot_be_read_end_it_before_the_run(run_command: Run, server: LoadService, tmp_path: Path) -> None:
    asked = ("load", "--server", server.address, "--concurrency", 1, "--requests", 1, "--metrics", server.address)
    code, out, err = run_command(*asked)
    assert (code, out, server.requests) == (2, "", [])
    assert err.startswith(f"dragoman: --metrics: http://{server.address}/metrics cannot be read: ")
    assert run_command(*asked, "--metrics", UNREACHABLE, "--no-probe", "--output", tmp_path / "result.json")[0] == 0
    assert read_result(tmp_path / "result.json").settings["--metrics"] == f"{server.address} {UNREACHABLE}"


def test_the_probe_asks_as_the_run_will_and_counts_nowhere(server: LoadService) -> None:
    work = {
        "mix": {"unary": 0.8, "stream": 0.1, "batch": 0.1},
        "batch_size": 3,
        "beams": {1: 0.5, 4: 0.5},
        "fields": {"model": "en-de"},
    }
    findings = asyncio.run(probe(make_plan(server.address, "secret", work, concurrency=1)))
    assert [model["name"] for model in findings.models] == ["en-de", "en-fr"] and findings.warnings == []
    assert sorted(request.num_beams for request in server.probes) == [1] * 5 + [4] * 5
    assert {request.model for request in server.probes} == {"en-de"} and server.requests == []
    assert {metadata["authorization"] for _, metadata in server.metadata} == {"Bearer secret"}
    server.probes.clear()
    asyncio.run(probe(make_plan(server.address, concurrency=1, injections=Injections(malformed_share=1.0))))
    assert [request.text.count(" ") for request in server.probes] == [2]  # it does not misbehave


def test_the_probe_waits_for_a_starting_server_warns_of_a_busy_one_and_asks_each(server: LoadService) -> None:
    plan = make_plan(server.address, concurrency=1)
    server.refusals.extend([failing("UNAVAILABLE", "the engine is starting")] * 2)
    assert asyncio.run(probe(plan)).warnings == [] and len(server.probes) == 3
    server.refusals.extend([failing("RESOURCE_EXHAUSTED", "the queue is full")] * 5)
    findings = asyncio.run(probe(plan))
    assert findings.warnings == [f"{server.address} refused calls already before the run: the queue is full"]
    server.probes.clear()
    with pytest.raises(CallError, match=rf"^{UNREACHABLE}: ") as failed:
        asyncio.run(probe(make_plan(f"ipv4:{server.address},{UNREACHABLE}", concurrency=1)))
    assert failed.value.code == "UNAVAILABLE" and len(server.probes) == 1


def test_a_failed_probe_names_the_flag_and_leaves_files_as_they_were(run_command: Run, server: LoadService, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    for status, words, code, told in (
        ("INVALID_ARGUMENT", "do_sample: no", 2, "--field do_sample: no (INVALID_ARGUMENT)"),
        ("INVALID_ARGUMENT", "text: too long", 2, "text: too long (INVALID_ARGUMENT)"),
        ("UNAUTHENTICATED", "who are you?", 1, "who are you? (UNAUTHENTICATED)"),
        ("INTERNAL", "broken: 0123", 1, "broken: 0123 (INTERNAL)"),
    ):
        server.refusals.extend([failing(status, words)] * 2)
        asked = ("load", "--server", server.address, "--rate", 5, "--duration", 1000, "--output", output)
        assert run_command(*asked) == (code, "", f"dragoman: {server.address}: {told}\n") and list(tmp_path.iterdir()) == []
        output.write_text("precious")
        assert run_command(*asked)[:2] == (code, "") and output.read_text() == "precious"
        output.unlink()
    assert server.requests == []


def test_tls_with_certificates_is_spoken_by_the_probe_and_by_the_senders(run_command: Run, certificates: Path) -> None:
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (certificates / "ca.pem").read_bytes(), require_client_auth=True)
    authority = ("--ca", certificates / "ca.pem", "--server-name", "server.example")
    ours = ("--certificate", certificates / "client.pem", "--key", certificates / "client.key")
    with serving(credentials) as server:
        code, _, err = run_command("load", "--server", server.address, *authority, "--rate", 5, "--duration", 1000)
        assert code == 1 and server.address in err and "UNAVAILABLE" in err and len(err.splitlines()) == 1
        assert not server.requests + server.probes
        for address in (server.address, f"{server.address},{server.address}"):
            code, out, _ = run_command("load", "--server", address, *authority, *ours, "--concurrency", 2, "--requests", 10)
            assert code == 0 and "errors: none" in out
        assert (len(server.requests), len(server.probes)) == (20, 2)


@pytest.mark.parametrize("flag", ["--output", "--report"])
def test_a_file_that_cannot_be_written_is_named_with_its_flag_before_the_run(
    run_command: Run, server: LoadService, tmp_path: Path, flag: str
) -> None:
    code, out, err = run_command("load", "--server", server.address, "--concurrency", 1, "--requests", 1, flag, tmp_path)
    assert (code, out, server.requests, server.probes) == (2, "", [], [])
    assert err.endswith(f"{flag}: {tmp_path}: Is a directory\n")
