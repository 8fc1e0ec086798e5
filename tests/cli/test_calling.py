"""Commands that call a server or its admin service: output, one line of error, exit code, and files that can be resumed."""

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman.v1 import generation_pb2, repository_pb2
from tests.cli.conftest import NUM_LAYERS, assert_refused, is_one_line, score_with_attention
from tests.client.fake_server import PATIENCE_SECONDS, AdminService, Held, Service, answer_to, failing, interrupt
from tests.system.harness.server import wait_until

Run = Callable[..., tuple[int, str, str]]
UNREACHABLE = "127.0.0.1:1"
COMMANDS = {
    "translate": "translate hello --model loud",
    "models": "models",
    "score": "score --source {0}/two --target {0}/two --model loud",
    "evaluate": "evaluate --source {0}/two --reference {0}/two --model loud",
    "health": "health",
}


def command(name: str, files: Path) -> list[str]:
    return COMMANDS[name].format(files).split()


@pytest.fixture
def ask(run_command: Run, server: str) -> Run:
    """Run a command that asks the model `loud`."""
    return lambda name, *arguments: run_command(name, "--server", server, "--model", "loud", *arguments)


def test_a_command_says_that_the_server_is_not_there(run_command: Run, files: Path) -> None:
    advice = "nothing answers there (connection refused); is `dragoman serve` running? --server names another"
    for name in ("translate", "models"):
        told = (1, "", f"dragoman: {UNREACHABLE}: {advice}\n")
        assert run_command(*command(name, files), "--server", UNREACHABLE) == told


def test_a_store_that_does_not_answer_fails_pull_and_serve_alike(start, tmp_path: Path) -> None:
    store = "https://127.0.0.1:1/models/"
    for command in (("pull", store, tmp_path / "a"), ("serve", "--models", store)):
        process = start(*command, XDG_CACHE_HOME=str(tmp_path))
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1 and f"dragoman: {store}bundle.json: " in err.decode()


def test_waiting_for_a_server_lists_its_models_or_gives_the_reason(run_command: Run, serve, server: str) -> None:
    code, out, err = run_command("models", "--server", server, "--wait", "60")
    assert (code, err) == (0, "") and "en-de" in out
    waiting = ("models", "--wait", "0.01", "--server")
    told = (f"{UNREACHABLE}: nothing answers there", "not ready within 0.01 s")
    assert_refused(run_command(*waiting, UNREACHABLE), *told, code=1)
    target = serve(is_ready=False)
    assert_refused(run_command(*waiting, target), f"{target}: readiness is not serving", code=1)


def test_each_command_can_present_a_certificate(run_command: Run, serve, certificates: Path, files: Path) -> None:
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    authority = certificates / "ca.pem"
    target = serve(credentials=grpc.ssl_server_credentials([pair], authority.read_bytes(), require_client_auth=True))
    ours = ["--certificate", certificates / "client.pem", "--key", certificates / "client.key"]
    for name in COMMANDS:
        asked = [*command(name, files), "--server", target, "--ca", authority, "--server-name", "server.example"]
        code, out, err = run_command(*asked, *ours)
        assert (code, err) == (0, "") and out
        not_serving = "not serving\n" if name == "health" else ""
        assert_refused(run_command(*asked), target, "--certificate and --key", code=1, out=not_serving)


def test_health_tells_what_is_not_serving_and_why(run_command: Run, serve, service: Service, server: str) -> None:
    assert run_command("health", "--server", server) == (0, "serving\n", "")
    assert run_command("health", "--server", server, "--json") == (0, '{"is_serving": true, "reason": ""}\n', "")
    target = serve(is_ready=False)
    assert run_command("health", "--server", target, "--service", "liveness") == (0, "serving\n", "")
    unknown = "no service 'en-xx'; there are liveness, readiness and the models by their names"
    service.script.append(failing("UNAUTHENTICATED", "the token is missing"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = f"127.0.0.1:{listening.getsockname()[1]}"
        for address, service, reason in (
            (target, "", "readiness is not serving, the server says"),
            (target, "loud", "loud is not serving, the server says"),
            (server, "en-xx", unknown),
            (silent, "", "no answer in time (DEADLINE_EXCEEDED)"),
            (UNREACHABLE, "", "nothing answers there (connection refused); is `dragoman serve` running? --server names another"),
        ):
            told = run_command("health", "--server", address, "--service", service, "--timeout", "0.3")
            assert told == (1, "not serving\n", f"dragoman: {address}: {reason}\n")


def test_a_refusal_names_the_flag_or_the_line(ask: Run, service: Service, files: Path) -> None:
    pair = ("--source", files / "two", "--reference", files / "two")
    for status, refusal, told in (
        ("INVALID_ARGUMENT", "num_beams: 9 is not in 1 to 8", "--num-beams: 9 is not in 1 to 8"),
        ("INVALID_ARGUMENT", "text: 300 tokens", "{}: text: 300 tokens"),
        ("NOT_FOUND", "model_version: '9' is not served", "--model-version: '9' is not served (NOT_FOUND)"),
    ):
        service.behaviours = dict.fromkeys(("b", "a cat"), failing(status, refusal))
        code = 2 if status == "INVALID_ARGUMENT" else 1
        assert ask("translate", "a", "b") == (code, "A\n", f"dragoman: {told.format('text 2')}\n")
        assert ask("evaluate", *pair) == (code, "", f"dragoman: {told.format(f'{files}/two, line 2')}\n")
    assert_refused(ask("translate", "--sample", "--seed", 2**64, "a"), "dragoman: --seed: 18446744073709551616 is out of range")


def test_lines_come_in_order_and_a_blank_line_stays_blank(ask: Run, service: Service, files: Path) -> None:
    (files / "a").write_text("dog\n\ncat\n")
    (files / "b").write_text("Hund\n \n\n")
    told = ask("score", "--source", files / "a", "--target", files / "b")
    assert told == (0, "-1.500000\t-7.500000\n\n-1.500000\t-1.500000\n", "")
    assert ask("translate", "--in", files / "empty", "--out", files / "out") == (0, "", "")
    assert (files / "out").read_bytes() == b""
    assert ask("translate", "--in", files / "a", "--out", "-") == (0, "DOG\n\nCAT\n", "")
    # A model may have several answers by default; a line in is a line out unless the caller asks for more.
    service.answer = lambda request: answer_to(generation_pb2.GenerateRequest(text=request.text, num_return_sequences=3))
    assert ask("translate", "a", "", "b") == (0, "A\n\nB\n", "")
    assert ask("translate", "--num-return-sequences", 2, "a", "", "b") == (0, "A\nA!\n\n\nB\nB!\n", "")
    assert ask("translate", "--scores", "a") == (0, "-0.500000\tA\n", "")


def test_a_warning_is_printed_once(ask: Run, service: Service, files: Path) -> None:
    def answer(request: Any) -> Any:
        response = answer_to(request)
        response.warnings.append("text: has several sentences")
        return response

    service.answer = answer
    for arguments, out, place in (
        (("a", "", "b"), "A\n\nB\n", "text 1"),
        (("--stream", "", "a", "b"), "\nA\nB\n", "text 2"),
        (("--in", files / "two", "--out", "-"), "A DOG\nA CAT\n", f"{files}/two, line 1"),
    ):
        assert ask("translate", *arguments) == (0, out, f"dragoman: {place}: has several sentences\n")


BEAMS = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True, "min_new_tokens": 3}
RULES = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "forced_prefix": "Ein"}
DRAWING = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "seed": 9}
DETAILS = {"return_alternatives": True, "return_log_probs": True, "top_log_probs": 2}
LANGUAGES = {"source_language": "en", "target_language": "deu_Latn", "model_version": "canary"}
TERMS = {
    "terms": [generation_pb2.Term(source="dog", targets=["Hund", "Köter"]), generation_pb2.Term(source="Acme")],
    "glossary": "house",
}


def test_every_flag_of_a_request_reaches_the_server(ask: Run, service: Service, files: Path) -> None:
    languages = ("--from", "en", "--to", "deu_Latn", "--model-version", "canary")
    for flags, fields in (
        ("--num-beams 4 --num-return-sequences 2 --length-penalty 0.5 --early-stopping --min-new-tokens 3", BEAMS),
        ("--repetition-penalty 1.5 --no-repeat-ngram-size 2 --forced-prefix Ein --scores", RULES),
        ("--sample --temperature 0.5 --top-k 7 --top-p 0.25 --seed 9", DRAWING),
        ("--alternatives --log-probs --top-log-probs 2 --json", DETAILS),
        ("--no-early-stopping --no-sample --top-k 0", {"early_stopping": False, "do_sample": False, "top_k": 0}),
        (" ".join(languages), LANGUAGES),
        ("--max-new-tokens 5 --truncate", {"max_new_tokens": 5, "truncate": True}),
        ("--special-tokens-in-text", {"special_tokens_in_text": True}),
        ("--term dog=Hund|Köter --term Acme --glossary house", TERMS),
        ("--no-special-tokens-in-text", {"special_tokens_in_text": False}),
        ("", {}),
    ):
        assert ask("translate", *flags.split(), "a")[0] == 0
        request = service.requests.pop()
        sent = {field.name: value for field, value in request.ListFields() if field.name not in ("text", "request_id", "model")}
        assert sent == fields
    for name in ("score", "evaluate"):
        assert ask(*command(name, files), *languages)[0] == 0
    assert {tuple(getattr(request, field) for field in LANGUAGES) for request in service.requests} == {tuple(LANGUAGES.values())}


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
    service.score = score_with_attention
    answer = generation_pb2.GenerateResponse(text="A DOG", finish_reason=1, tokens=[7, 8], model="loud", model_version="9")
    service.answer = lambda _: answer
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
    answer.finish_reason = 2
    _, _, err = ask("attention", "a dog", "--output", output, "--max-new-tokens", 2)
    assert "dragoman: The answer did not end within 2 tokens; it is cut there.\n" in err


def test_attention_that_a_server_cannot_tell_is_named(ask: Run, service: Service, tmp_path: Path) -> None:
    service.score = score_with_attention
    service.behaviours["blind"] = failing("INVALID_ARGUMENT", "return_alignment: model loud has no attention to a source")
    for *arguments, told in (
        ("a dog", "ein Hund", "--layer", 3, "--layer: 3 is not in 0 to 2, the decoder layers of model loud"),
        ("blind", "a", "model loud has no attention to a source"),
        (" ".join(["dog"] * 64), "a", "source: 65 tokens; a picture shows 64 at most"),
        ("a", " ".join(["dog"] * 64), "target: 65 tokens; a picture shows 64 at most"),
    ):
        assert_refused(ask("attention", *arguments, "--output", tmp_path / "a.png"), told)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["reader gone", "interrupted"])
def test_a_translation_that_is_ended_is_quiet(start, server: str, ending: str) -> None:
    process = start("translate", "--server", server, "--model", "loud")
    process.stdin.write(b"a\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"A\n"
    if ending == "interrupted":
        assert interrupt(process) == (b"", b"")
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


@pytest.fixture
def translation(tmp_path: Path, server: str) -> list[object]:
    """A command that translates five lines, one at a time."""
    (tmp_path / "in.txt").write_text("a\n\nb\nstuck\nc\n")
    paths = ["--in", tmp_path / "in.txt", "--out", tmp_path / "out.txt"]
    return ["translate", "--server", server, "--model", "loud", "--concurrency", 1, *paths]


def left_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) - {"in.txt"}


@pytest.mark.parametrize(("signal_", "num_lines"), [(signal.SIGINT, 3), (signal.SIGKILL, 3), (signal.SIGINT, 0)])
def test_interrupted_work_is_kept_and_resumed(
    run_command: Run, start, translation: list[object], service: Service, tmp_path: Path, signal_: int, num_lines: int
) -> None:
    partial, source = tmp_path / "out.txt.partial", tmp_path / "in.txt"
    service.behaviours["stuck"] = held = Held()
    if num_lines == 0:
        source.write_text("stuck\n")
    process = start(*translation)
    held.wait_until_began()
    wait_until(lambda: partial.read_text() == "A\n\nB\n"[: num_lines + 2 if num_lines else 0], "lines before the fourth")
    if signal_ == signal.SIGKILL:
        process.kill()
    out, err = interrupt(process) if signal_ == signal.SIGINT else process.communicate(timeout=PATIENCE_SECONDS)
    held.assert_cancelled()
    if num_lines == 0:
        assert (process.returncode, out, err, left_in(tmp_path)) == (130, b"", b"", set())
        return
    if signal_ == signal.SIGINT:
        num_done = partial.read_text().count("\n")  # the signal may come before the last line that was written counts
        told = f"dragoman: interrupted; {num_done} of 5 lines are done, in {partial}; --resume goes on from there\n"
        assert (process.returncode, out, err.decode()) == (130, b"", told) and num_done in (2, 3)
    source.write_text("a\n\nb\nfree\nc\n")
    service.requests.clear()
    assert run_command(*translation, "--resume") == (0, "", "")
    assert (tmp_path / "out.txt").read_text() == "A\n\nB\nFREE\nC\n" and left_in(tmp_path) == {"out.txt"}
    texts = [request.text for request in service.requests]
    assert texts[-2:] == ["free", "c"] and "a" not in texts


def test_lines_that_are_done_when_the_server_fails_are_kept(
    run_command: Run, translation: list[object], service: Service, tmp_path: Path
) -> None:
    for status, code in (("INTERNAL", 1), ("INVALID_ARGUMENT", 2)):
        service.behaviours["stuck"] = failing(status)
        note = f"; 3 of 5 lines are done, in {tmp_path}/out.txt.partial; --resume goes on from there\n"
        assert_refused(run_command(*translation, *([] if code == 1 else ["--resume"])), note, code=code)
    assert_refused(run_command(*translation), "3 lines of an earlier run are left there; --resume goes on with them")
    assert_refused(run_command(*translation, "--resume", "--num-beams", 4), "dragoman: --num-beams: 4, but what is done")
    assert left_in(tmp_path) == {"out.txt.partial", "out.txt.partial.state"}


@pytest.fixture
def admin() -> AdminService:
    return AdminService()


@pytest.fixture
def address(serve, admin: AdminService) -> str:
    return serve(admin=admin)


@pytest.mark.parametrize(
    ("command", "request_"),
    [
        ("list", repository_pb2.ListRepositoryRequest()),
        ("list en-de", repository_pb2.ListRepositoryRequest(model="en-de")),
        ("refresh", repository_pb2.RefreshRepositoryRequest()),
        ("load en-de", repository_pb2.LoadModelRequest(model="en-de")),
        ("load en-de 3", repository_pb2.LoadModelRequest(model="en-de", version="3")),
        ("unload en-de 3", repository_pb2.UnloadModelRequest(model="en-de", version="3")),
        ("reload en-de", repository_pb2.ReloadModelRequest(model="en-de")),
        ("rollback en-de 3", repository_pb2.RollbackModelRequest(model="en-de", version="3")),
        ("label en-de canary 3", repository_pb2.SetLabelRequest(model="en-de", label="canary", version="3")),
        ("label en-de canary", repository_pb2.SetLabelRequest(model="en-de", label="canary")),
    ],
)
def test_each_admin_command_is_a_request(run_command: Run, address: str, admin: AdminService, command: str, request_: Any) -> None:
    code, out, err = run_command("models", *command.split(), "--server", address, "--token", "s")
    assert (code, err) == (0, "") and "en-de" in out and "serving" in out
    assert (admin.requests, admin.tokens) == ([request_], ["Bearer s"])
    code, out, err = run_command("models", *command.split(), "--server", address, "--json")
    assert (code, err) == (0, "") and json.loads(out)["versions"][0]["state"] == "serving"


def test_address_and_token_of_the_admin_service_may_be_variables(run_command: Run, address: str, admin, monkeypatch) -> None:
    for name, value in {"ADMIN_SERVER": address, "ADMIN_TOKEN": "s", "SERVER": UNREACHABLE, "TOKEN": "of-a-caller"}.items():
        monkeypatch.setenv(f"DRAGOMAN_{name}", value)
    assert run_command("models", "rollback", "en-de")[0] == 0
    assert admin.tokens == ["Bearer s"]


def test_a_failed_admin_command_is_a_line_and_exit_code_1(run_command: Run, address: str, admin, server: str) -> None:
    admin.failures["none"] = failing("NOT_FOUND", 'model: "none" is not there; there: en-de')  # the model is no option
    told = 'dragoman: model: "none" is not there; there: en-de (NOT_FOUND)\n'
    assert run_command("models", "reload", "none", "--server", address) == (1, "", told)
    admin.problem = "models: no such folder"
    code, out, err = run_command("models", "list", "--server", address)
    assert code == 0 and "en-de" in out and is_one_line(err) and "models: no such folder" in err
    listing = ("models", "list", "--server")
    assert_refused(run_command(*listing, UNREACHABLE), f"{UNREACHABLE}: nothing answers there", "admin_port", code=1)
    assert_refused(run_command(*listing, server), "admin_port", "UNIMPLEMENTED", code=1)  # the port of the service itself
