"""Commands that ask a server: what they print, one line of error, and their exit code."""

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cli.conftest import NUM_LAYERS, PATIENCE_SECONDS, Service, is_one_line

Run = Callable[..., tuple[int, str, str]]
UNREACHABLE = "127.0.0.1:1"
ASKING = {
    "translate": "translate hello --model loud",
    "models": "models",
    "score": "score --source {0}/two --target {0}/two --model loud",
    "evaluate": "evaluate --source {0}/two --reference {0}/two --model loud",
    "perplexity": "perplexity --source {0}/two --target {0}/two --model loud",
    "health": "health",
}
OF_REQUESTS = ("translate", "score", "evaluate")


def asking(name: str, files: Path) -> list[str]:
    return ASKING[name].format(files).split()


@pytest.fixture
def ask(run_command: Run, server: str) -> Run:
    """Run a command that asks the model `loud`."""
    return lambda name, *arguments: run_command(name, "--server", server, "--model", "loud", *arguments)


@pytest.mark.parametrize("name", [name for name in ASKING if name != "health"])
def test_a_server_that_is_not_there_is_told_with_the_option(run_command: Run, files: Path, name: str) -> None:
    advice = "nothing answers there (connection refused); is `dragoman serve` running? --server names another"
    assert run_command(*asking(name, files), "--server", UNREACHABLE) == (1, "", f"dragoman: {UNREACHABLE}: {advice}\n")


def test_waiting_for_a_server_lists_its_models_or_gives_the_reason(run_command: Run, serve, server: str) -> None:
    code, out, err = run_command("models", "--server", server, "--wait", "60")
    assert (code, err) == (0, "") and "loud" in out
    code, _, err = run_command("models", "--server", UNREACHABLE, "--wait", "0.01")
    assert code == 1 and is_one_line(err) and "not ready within 0.01 s" in err and f"{UNREACHABLE}: nothing answers there" in err
    target = serve(None, "NOT_SERVING").target
    code, _, err = run_command("models", "--server", target, "--wait", "0.01")
    assert code == 1 and is_one_line(err) and f"{target}: readiness is not serving" in err


@pytest.mark.parametrize("name", ["translate", "models", "score", "evaluate", "health"])
def test_a_server_that_asks_for_certificates_can_be_used(
    run_command: Run, serve, certificates: Path, files: Path, name: str
) -> None:
    authority = certificates / "ca.pem"
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    target = serve(grpc.ssl_server_credentials([pair], authority.read_bytes(), require_client_auth=True)).target
    command = [*asking(name, files), "--server", target, "--ca", authority, "--server-name", "server.example"]
    ours = ["--certificate", certificates / "client.pem", "--key", certificates / "client.key"]
    code, out, err = run_command(*command, *ours)
    assert (code, err) == (0, "") and out
    code, out, err = run_command(*command)
    assert code == 1 and is_one_line(err) and target in err and "--certificate and --key" in err
    assert out == ("not serving\n" if name == "health" else "")


def test_health_tells_what_is_not_serving_and_why(run_command: Run, serve, server: str) -> None:
    assert run_command("health", "--server", server) == (0, "serving\n", "")
    target = serve(None, "NOT_SERVING").target
    assert run_command("health", "--server", target, "--service", "liveness") == (0, "serving\n", "")
    unknown = "no service 'en-xx'; there are liveness, readiness and the models by their names"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = f"127.0.0.1:{listening.getsockname()[1]}"
        for address, service, reason in (
            (target, "", "readiness is not serving, the server says"),
            (target, "loud", "loud is not serving, the server says"),
            (server, "en-xx", unknown),
            (silent, "", "no answer in time (DEADLINE_EXCEEDED)"),
        ):
            told = run_command("health", "--server", address, "--service", service, "--timeout", "0.3")
            assert told == (1, "not serving\n", f"dragoman: {address}: {reason}\n")


@pytest.mark.parametrize(
    ("status", "refusal", "told"),
    [
        (
            "INVALID_ARGUMENT",
            "do_sample: not with num_beams above 1, which is 4",
            "--sample: not with --num-beams above 1, which is 4",
        ),
        ("INVALID_ARGUMENT", "num_return_sequences: 9 is not in 1 to 8", "--num-return-sequences: 9 is not in 1 to 8"),
        ("INVALID_ARGUMENT", "target_language: 'xx' is not one of de, en", "--to: 'xx' is not one of de, en"),
        ("INVALID_ARGUMENT", "text: 300 tokens", "text 2: text: 300 tokens"),
        ("NOT_FOUND", "model_version: '9' is not served", "--model-version: '9' is not served (NOT_FOUND)"),
    ],
)
def test_a_refusal_names_the_flag(ask: Run, service: Service, status: str, refusal: str, told: str) -> None:
    service.refusals["b"] = (grpc.StatusCode[status], refusal)
    code = 2 if status == "INVALID_ARGUMENT" else 1
    assert ask("translate", "a", "b") == (code, "A\n", f"dragoman: {told}\n")


def test_values_that_the_request_or_the_server_cannot_take_name_the_flag(ask: Run, service: Service, files: Path) -> None:
    code, out, err = ask("translate", "--sample", "--seed", 2**64, "a")
    assert (code, out) == (2, "") and is_one_line(err) and err.startswith("dragoman: --seed: 18446744073709551616 is out of range")
    code, out, err = ask("translate", "--model", "quiet", "hello")
    assert (code, out) == (1, "") and is_one_line(err) and "--model: 'quiet'" in err and "NOT_FOUND" in err
    for refusal, told in (
        ("num_beams: 9 is not in 1 to 8", "--num-beams: 9 is not in 1 to 8"),
        ("text: 300 tokens", "{}: text: 300 tokens"),
    ):
        service.refusals["a cat"] = (grpc.StatusCode.INVALID_ARGUMENT, refusal)
        pair = ("--source", files / "two", "--reference", files / "two")
        assert ask("evaluate", *pair) == (2, "", f"dragoman: {told.format(f'{files}/two, line 2')}\n")


def test_lines_come_in_order_and_a_blank_line_stays_blank(ask: Run, service: Service, files: Path) -> None:
    assert ask("translate", "a", "", "c") == (0, "A\n\nC\n", "")
    (files / "a").write_text("dog\n\ncat\n")
    (files / "b").write_text("Hund\n \n\n")
    told = ask("score", "--source", files / "a", "--target", files / "b")
    assert told == (0, "-1.500000\t-7.500000\n\n-1.500000\t-1.500000\n", "")
    assert ask("translate", "--in", files / "empty", "--out", files / "out") == (0, "", "")
    assert (files / "out").read_bytes() == b""
    # A model may have several answers by default; a line in is a line out unless the caller asks for more.
    service.num_answers = 3
    assert ask("translate", "a", "", "b") == (0, "A\n\nB\n", "")
    assert ask("translate", "--scores", "a", "", "b") == (0, "-1.500000\tA\n\n-1.500000\tB\n", "")
    assert ask("translate", "--num-return-sequences", 2, "a", "", "b") == (0, "A\nA!\n\n\nB\nB!\n", "")


BEAMS = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True, "min_new_tokens": 3}
RULES = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "forced_prefix": "Ein"}
DRAWING = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "seed": 9}
DETAILS = {"return_alternatives": True, "return_log_probs": True, "top_log_probs": 2}


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("--num-beams 4 --num-return-sequences 2 --length-penalty 0.5 --early-stopping --min-new-tokens 3", BEAMS),
        ("--repetition-penalty 1.5 --no-repeat-ngram-size 2 --forced-prefix Ein --scores", RULES),
        ("--sample --temperature 0.5 --top-k 7 --top-p 0.25 --seed 9", DRAWING),
        ("--alternatives --log-probs --top-log-probs 2 --json", DETAILS),
        ("--no-early-stopping --no-sample --top-k 0", {"early_stopping": False, "do_sample": False, "top_k": 0}),
        ("--from en --to deu_Latn --model-version canary", {"source_language": "en", "target_language": "deu_Latn"}),
        ("--max-new-tokens 5 --truncate", {"max_new_tokens": 5, "truncate": True}),
        ("", {}),
    ],
)
def test_every_flag_of_a_request_reaches_the_server(ask: Run, service: Service, flags: str, fields: dict[str, Any]) -> None:
    assert ask("translate", *flags.split(), "a")[0] == 0
    (request,) = service.requests
    sent = {field.name: value for field, value in request.ListFields() if field.name not in ("text", "request_id", "model")}
    assert sent == fields | ({"model_version": "canary"} if "canary" in flags else {})


@pytest.mark.parametrize("name", OF_REQUESTS)
def test_languages_and_version_reach_the_server(run_command: Run, server: str, service: Service, files: Path, name: str) -> None:
    options = ("--from", "en", "--to", "deu_Latn", "--model-version", "canary")
    code, _, err = run_command(*asking(name, files), "--server", server, *options)
    assert (code, err) == (0, "")
    sent = {(request.source_language, request.target_language, request.model_version) for request in service.requests}
    assert sent == {("en", "deu_Latn", "canary")}


def test_a_server_is_evaluated_as_its_model_is_or_with_beams(ask: Run, service: Service, files: Path) -> None:
    pair = ("--source", files / "two", "--reference", files / "two")
    assert ask("evaluate", *pair, "--length-penalty", 0.5)[0] == 0
    assert ask("evaluate", *pair, "--num-beams", 5, "--length-penalty", 0.5)[0] == 0
    code, out, _ = ask("evaluate", *pair, "--lowercase", "--json")
    assert code == 0 and '"chrf": 100.0' in out and "case:lc" in out
    sent = [(request.HasField("num_beams"), request.num_beams, request.length_penalty) for request in service.requests]
    assert sent == [(False, 0, 0.5)] * 2 + [(True, 5, 0.5)] * 2 + [(False, 0, 0.0)] * 2


def titles(page: Path) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", page.read_text(encoding="utf-8"))[1:]


def test_attention_of_a_server_is_asked_for_layer_by_layer(ask: Run, service: Service, tmp_path: Path) -> None:
    output = tmp_path / "a.html"
    code, out, err = ask("attention", "a dog", "--output", output)
    assert (code, out) == (0, f"wrote {output}: 4 maps of model loud\n") and is_one_line(err)
    layers = [*(f"layer {n}" for n in range(NUM_LAYERS)), "mean of all layers"]
    assert titles(output) == [f"Cross-attention, {layer}, mean of all heads" for layer in layers]
    answered, *scored = service.requests
    assert answered.num_beams == 1 and answered.HasField("do_sample") and not answered.do_sample
    assert {(request.target, request.model, request.model_version) for request in scored} == {("A DOG", "loud", "9")}
    page = output.read_text(encoding="utf-8")
    assert "A → a 0.33" in page and "␣DOG → ␣dog 1.00" in page and "⟨eos⟩ → ⟨eos⟩ 1.00" in page
    service.requests.clear()
    options = ("--layer", 2, "--from", "en", "--to", "de", "--model-version", "canary")
    assert ask("attention", "a dog", "ein Hund", "--output", tmp_path / "a.png", *options)[0] == 0
    (request,) = service.requests
    assert (request.alignment_layer, request.source_language, request.target_language) == (2, "en", "de")
    assert request.model_version == "canary" and (tmp_path / "a.png").exists()
    _, _, err = ask("attention", "a dog", "--output", output, "--max-new-tokens", 2)
    assert "dragoman: The answer did not end within 2 tokens; it is cut there.\n" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["a dog", "ein Hund", "--layer", 3], "--layer: 3 is not in 0 to 2, the decoder layers of model loud"),
        (["blind", "a"], "model loud has no attention to a source"),
        ([" ".join(["dog"] * 64), "a"], "source: 65 tokens; a picture shows 64 at most"),
        (["a", " ".join(["dog"] * 64)], "target: 65 tokens; a picture shows 64 at most"),
    ],
)
def test_attention_that_a_server_cannot_tell_is_named(
    ask: Run, service: Service, tmp_path: Path, arguments: list[Any], told: str
) -> None:
    reason = "return_alignment: model loud has no attention to a source"
    service.refusals["blind"] = (grpc.StatusCode.INVALID_ARGUMENT, reason)
    code, out, err = ask("attention", *arguments, "--output", tmp_path / "a.png")
    assert (code, out) == (2, "") and is_one_line(err) and told in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["reader gone", "interrupted"])
def test_a_translation_that_is_ended_is_quiet(start, server: str, ending: str) -> None:
    process = start("translate", "--server", server, "--model", "loud")
    process.stdin.write(b"a\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"A\n"
    if ending == "interrupted":
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    else:
        process.stdout.close()
        process.stdin.write(b"b\n")
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.wait(PATIENCE_SECONDS) == (130 if ending == "interrupted" else 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_is_full_is_one_line(start, server: str) -> None:
    with open("/dev/full", "wb") as full:
        process = start("translate", "--server", server, "--model", "loud", "a", stdout=full)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2 and is_one_line(err.decode())
