"""What asks a server, as users see it: output, one line of error, exit code."""

import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

PATIENCE_SECONDS = 120
NOBODY = "127.0.0.1:1"
ASKING = {
    "translate": "translate hello",
    "models": "models",
    "score": "score --source {0}/two --target {0}/two",
    "evaluate": "evaluate --source {0}/two --reference {0}/two",
}
NO_OPTIONS_OF_REQUESTS = ("models", "health")


def is_one_line(text: str) -> bool:
    return text.startswith("dragoman: ") and text.count("\n") == 1 and text.endswith("\n")


def command_for(name: str, files: Path) -> list[str]:
    """Return a command that asks for the model `loud`, where it asks for one."""
    command = "health" if name == "health" else ASKING[name].format(files)
    return [*command.split(), *([] if name in NO_OPTIONS_OF_REQUESTS else ["--model", "loud"])]


@pytest.mark.parametrize("name", ASKING)
def test_a_server_that_is_not_there_is_told_with_what_to_do(run, files: Path, name: str) -> None:
    code, out, err = run(*command_for(name, files), "--server", NOBODY)
    assert (code, out) == (1, "")
    advice = "nothing answers there (connection refused); is `dragoman serve` running? --server names another"
    assert err == f"dragoman: {NOBODY}: {advice}\n"


def test_waiting_for_a_server_ends_and_says_why(run, serve) -> None:
    code, _, err = run("models", "--server", NOBODY, "--wait", "0.01")
    assert code == 1 and is_one_line(err) and "not ready within 0.01 s" in err and f"{NOBODY}: nothing answers there" in err
    target = serve(None, "NOT_SERVING").target
    code, _, err = run("models", "--server", target, "--wait", "0.01")
    assert code == 1 and is_one_line(err) and f"{target}: readiness is not serving" in err


def test_waiting_without_an_end_that_can_come_is_refused(run) -> None:
    assert run("models", "--server", NOBODY, "--wait", "nan")[::2] == (2, "dragoman: --wait: nan is not a number of 0 or more\n")


def test_waiting_for_a_server_that_is_ready_lists_its_models(run, server: str) -> None:
    code, out, err = run("models", "--server", server, "--wait", "60")
    assert (code, err) == (0, "") and "loud" in out


def test_an_unknown_model_is_a_failed_call(run, server: str) -> None:
    code, out, err = run("translate", "--server", server, "--model", "quiet", "hello")
    assert (code, out) == (1, "")
    assert is_one_line(err) and "--model: 'quiet'" in err and "loaded: loud" in err and "NOT_FOUND" in err


@pytest.mark.parametrize("name", [*ASKING, "health"])
def test_a_server_that_asks_for_certificates_can_be_used(run, serve, certificates: Path, files: Path, name: str) -> None:
    authority = certificates / "ca.pem"
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    target = serve(grpc.ssl_server_credentials([pair], authority.read_bytes(), require_client_auth=True)).target
    command = [*command_for(name, files), "--server", target, "--ca", authority, "--server-name", "server.example"]
    ours = ["--certificate", certificates / "client.pem", "--key", certificates / "client.key"]
    code, out, err = run(*command, *ours)
    assert (code, err) == (0, "") and out
    code, out, err = run(*command)
    assert code == 1 and is_one_line(err) and target in err and "--certificate and --key" in err
    assert out == ("not serving\n" if name == "health" else "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--ca", "ca.pem"], "the certificate is for another name; --server-name says"),
        (["--ca", "client.pem", "--server-name", "server.example"], "the certificate is not trusted ("),
        ([], "where it speaks TLS only, --ca turns that on"),
    ],
)
@pytest.mark.parametrize("name", ["translate", "health"])
def test_a_tls_handshake_that_fails_is_explained(
    run, serve, certificates: Path, files: Path, name: str, options: list[str], reason: str
) -> None:
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    target = serve(grpc.ssl_server_credentials([pair])).target
    values = [certificates / option if option.endswith(".pem") else option for option in options]
    code, out, err = run(*command_for(name, files), "--server", target, *values)
    assert code == 1 and out == ("not serving\n" if name == "health" else "")
    assert is_one_line(err) and err.startswith(f"dragoman: {target}: ") and reason in err


def test_tls_to_a_server_without_it_is_explained(run, server: str, certificates: Path) -> None:
    code, _, err = run("translate", "--server", server, "--ca", certificates / "ca.pem", "--server-name", "server.example", "a")
    assert code == 1 and is_one_line(err) and "the server speaks plain text; leave --ca out" in err


def test_a_port_that_speaks_http_is_explained(run) -> None:
    """As the one of the metrics does."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1024)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threads.submit(answer)
        code, _, err = run("models", "--server", f"127.0.0.1:{listening.getsockname()[1]}")
        listening.shutdown(socket.SHUT_RDWR)
    assert code == 1 and is_one_line(err) and "does not speak gRPC; --server" in err


def test_health_says_what_is_not_serving(run, serve, server: str) -> None:
    assert run("health", "--server", server) == (0, "serving\n", "")
    target = serve(None, "NOT_SERVING").target
    assert run("health", "--server", target, "--service", "liveness") == (0, "serving\n", "")
    for service, name in (("", "readiness"), ("loud", "loud")):
        code, out, err = run("health", "--server", target, "--service", service)
        assert (code, out) == (1, "not serving\n")
        assert err == f"dragoman: {target}: {name} is not serving, the server says\n"


def test_health_of_an_unknown_service_is_told_once(run, server: str) -> None:
    code, out, err = run("health", "--server", server, "--service", "en-xx")
    assert (code, out) == (1, "not serving\n")
    assert err == f"dragoman: {server}: no service 'en-xx'; there are liveness, readiness and the models by their names\n"


def test_health_of_a_server_that_does_not_answer_ends(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = f"127.0.0.1:{listening.getsockname()[1]}"
        code, out, err = run("health", "--server", target, "--timeout", "0.2")
    assert (code, out) == (1, "not serving\n")
    assert err == f"dragoman: {target}: no answer in time (DEADLINE_EXCEEDED)\n"


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        ("do_sample: does not go with num_beams above 1, which is 4", "--sample: does not go with --num-beams above 1, which is 4"),
        ("num_return_sequences: 9 is not in 1 to 8, num_beams", "--num-return-sequences: 9 is not in 1 to 8, --num-beams"),
        ("return_alternatives: no", "--alternatives: no"),
        ("return_log_probs: no", "--log-probs: no"),
        ("text: 300 tokens", "text 2: text: 300 tokens"),
    ],
)
def test_a_refusal_names_the_flag(run, server: str, service, refusal: str, told: str) -> None:
    service.refusals["b"] = (grpc.StatusCode.INVALID_ARGUMENT, refusal)
    assert run("translate", "--server", server, "--model", "loud", "a", "b") == (2, "A\n", f"dragoman: {told}\n")


def test_a_value_that_does_not_fit_the_request_names_the_flag(run, server: str) -> None:
    flags = ("--sample", "--seed", 2**64)
    code, out, err = run("translate", "--server", server, "--model", "loud", *flags, "a")
    assert (code, out) == (2, "") and is_one_line(err) and err.startswith("dragoman: --seed: 18446744073709551616 is out of range")


def test_a_refused_evaluation_names_the_flag(run, server: str, service, files: Path) -> None:
    service.refusals["a cat"] = (grpc.StatusCode.INVALID_ARGUMENT, "num_beams: 9 is not in 1 to 8")
    command = [*command_for("evaluate", files), "--server", server]
    assert run(*command) == (2, "", "dragoman: --num-beams: 9 is not in 1 to 8\n")
    service.refusals["a cat"] = (grpc.StatusCode.INVALID_ARGUMENT, "text: 300 tokens")
    assert run(*command) == (2, "", f"dragoman: {files}/two, line 2: text: 300 tokens\n")


def test_scores_have_a_line_each_and_blank_pairs_a_blank_one(run, server: str, files: Path) -> None:
    (files / "a").write_text("dog\n\ncat\n")
    (files / "b").write_text("Hund\n \n\n")
    command = ["score", "--server", server, "--model", "loud", "--source", files / "a", "--target", files / "b"]
    assert run(*command) == (0, "-1.500000\t-7.500000\n\n-1.500000\t-1.500000\n", "")


def test_answers_come_in_order_and_a_blank_text_stays_blank(run, server: str) -> None:
    assert run("translate", "--server", server, "--model", "loud", "a", "", "c") == (0, "A\n\nC\n", "")


def test_every_flag_of_the_search_reaches_the_server(run, server: str, service) -> None:
    beams = "--num-beams 4 --num-return-sequences 2 --length-penalty 0.5 --early-stopping --min-new-tokens 3"
    rules = "--repetition-penalty 1.5 --no-repeat-ngram-size 2 --forced-prefix Ein --scores"
    command = ["translate", "--server", server, "--model", "loud"]
    assert run(*command, *beams.split(), *rules.split(), "a") == (0, "-1.500000\tA\n-2.500000\tA!\n", "")
    drawing = "--sample --temperature 0.5 --top-k 7 --top-p 0.25 --seed 9 --alternatives --log-probs --top-log-probs 2 --json"
    assert run(*command, *drawing.split(), "a")[0] == 0
    values = [{field.name: value for field, value in request.ListFields()} for request in service.requests]
    for sent in values:
        del sent["model"], sent["text"], sent["request_id"]
    assert values == [
        {
            "num_beams": 4,
            "num_return_sequences": 2,
            "length_penalty": 0.5,
            "early_stopping": True,
            "min_new_tokens": 3,
            "repetition_penalty": 1.5,
            "no_repeat_ngram_size": 2,
            "forced_prefix": "Ein",
        },
        {
            "do_sample": True,
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.25,
            "seed": 9,
            "return_alternatives": True,
            "return_log_probs": True,
            "top_log_probs": 2,
        },
    ]


def test_what_is_denied_reaches_the_server_too(run, server: str, service) -> None:
    command = ["translate", "--server", server, "--model", "loud"]
    assert run(*command, "--no-early-stopping", "--no-sample", "--top-k", 0, "a")[0] == 0
    assert run(*command, "a")[0] == 0
    denied, left = service.requests
    fields = ("early_stopping", "do_sample", "top_k")
    assert [denied.HasField(name) for name in fields] == [True] * 3 and not (denied.early_stopping or denied.do_sample)
    assert [left.HasField(name) for name in fields] == [False] * 3


@pytest.mark.parametrize("name", ["translate", "score", "evaluate"])
def test_languages_reach_the_server(run, server: str, service, files: Path, name: str) -> None:
    code, _, err = run(*command_for(name, files), "--server", server, "--from", "en", "--to", "deu_Latn")
    assert (code, err) == (0, "")
    assert {(request.source_language, request.target_language) for request in service.requests} == {("en", "deu_Latn")}


@pytest.mark.parametrize("name", ["translate", "score", "evaluate"])
def test_a_version_reaches_the_server(run, server: str, service, files: Path, name: str) -> None:
    code, _, err = run(*command_for(name, files), "--server", server, "--model-version", "canary")
    assert (code, err) == (0, "")
    assert {request.model_version for request in service.requests} == {"canary"}


def test_a_refused_version_names_the_flag(run, server: str, service) -> None:
    service.refusals["a"] = (grpc.StatusCode.NOT_FOUND, "model_version: '9' of model loud is not served; served: 1")
    code, out, err = run("translate", "--server", server, "--model", "loud", "--model-version", "9", "a")
    assert (code, out) == (1, "")
    assert err == "dragoman: --model-version: '9' of model loud is not served; served: 1 (NOT_FOUND)\n"


def test_a_refused_language_names_the_flag(run, server: str, service) -> None:
    service.refusals["a"] = (grpc.StatusCode.INVALID_ARGUMENT, "target_language: 'xx' is not one that loud writes: de, en")
    told = run("translate", "--server", server, "--model", "loud", "--to", "xx", "a")
    assert told == (2, "", "dragoman: --to: 'xx' is not one that loud writes: de, en\n")


@pytest.mark.parametrize("flag", ["--from", "--to"])
def test_languages_of_an_evaluation_are_a_servers_or_a_bundles(run, files: Path, flag: str) -> None:
    pair = ("--source", files / "two", "--reference", files / "two")
    told = run("evaluate", *pair, "--checkpoint", files, flag, "de")
    assert told == (2, "", f"dragoman: {flag} goes with --server or --bundle\n")


def test_answers_that_only_the_model_asked_for_have_no_line(run, server: str, service) -> None:
    """A model may have several by default; a line in is a line out unless the caller says."""
    service.num_answers = 3
    command = ["translate", "--server", server, "--model", "loud"]
    assert run(*command, "a", "", "b") == (0, "A\n\nB\n", "")
    assert run(*command, "--scores", "a", "", "b") == (0, "-1.500000\tA\n\n-1.500000\tB\n", "")
    assert run(*command, "--num-return-sequences", 2, "a", "", "b") == (0, "A\nA!\n\n\nB\nB!\n", "")


def test_a_server_is_evaluated_as_the_model_says(run, server: str, service, files: Path) -> None:
    pair = ("--source", files / "two", "--reference", files / "two")
    assert run("evaluate", *pair, "--server", server, "--model", "loud", "--length-penalty", 0.5)[0] == 0
    assert [request.HasField("num_beams") for request in service.requests] == [False] * 2
    told = run("evaluate", *pair, "--server", server, "--model", "loud", "--num-beams", 1, "--length-penalty", 0.5)
    assert told == (2, "", "dragoman: --length-penalty goes with --num-beams above 1\n")


def test_a_server_is_evaluated_with_beams(run, server: str, service, files: Path) -> None:
    pair = ("--source", files / "two", "--reference", files / "two")
    flags = ("--server", server, "--model", "loud", "--num-beams", 5, "--length-penalty", 0.5)
    assert run("evaluate", *pair, *flags)[0] == 0
    assert [(request.num_beams, request.length_penalty) for request in service.requests] == [(5, 0.5)] * 2


def test_an_empty_file_gives_an_empty_file(run, server: str, files: Path) -> None:
    out = files / "out"
    assert run("translate", "--server", server, "--model", "loud", "--in", files / "empty", "--out", out) == (0, "", "")
    assert out.read_bytes() == b""


def test_a_reader_that_goes_away_ends_the_command_quietly(start, server: str) -> None:
    process = start("translate", "--server", server, "--model", "loud")
    process.stdin.write(b"a\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"A\n"
    process.stdout.close()
    process.stdin.write(b"b\n")
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(PATIENCE_SECONDS) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_is_full_is_one_line(start, server: str) -> None:
    with open("/dev/full", "wb") as full:
        process = start("translate", "--server", server, "--model", "loud", "a", stdout=full)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2 and is_one_line(err.decode())


def test_interrupted_translation_says_nothing(start, server: str) -> None:
    process = start("translate", "--server", server, "--model", "loud")
    process.stdin.write(b"a\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"A\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert process.returncode == 130
