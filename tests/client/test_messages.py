"""Words for the command line: failures in one line with flags for fields, reasons not to be ready, and tables of models."""

import json
import re
from dataclasses import asdict, fields, replace
from io import StringIO
from typing import Any

import pytest

from dragoman.client.errors import CallError, DeadlineExceeded, InvalidArgument, ModelNotFound, Unavailable
from dragoman.client.flags import denial, flag, in_flags, refusal
from dragoman.client.health import why_not_serving
from dragoman.client.model_info import Defaults, Language, ModelInfo, ModelVersion
from dragoman.client.models_table import print_models
from dragoman.client.reach import in_one_line
from dragoman.client.retry import RetryPolicy
from dragoman.client.search import Search
from dragoman.client.sync import Client
from dragoman.client.unreachable import explain
from tests.client.fake_server import failing


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("do_sample: does not go with num_beams above 1", "--sample: does not go with --num-beams above 1"),
        ("return_alternatives: does not go with do_sample", "--alternatives: does not go with --sample"),
        ("temperature: goes with top_k or temperature", "--temperature: goes with --top-k or temperature"),
        ("3 max_new_tokens of 510, max_target_tokens of en-de", "3 --max-new-tokens of 510, max_target_tokens of en-de"),
        ("model: 'do_sample' is not loaded", "--model: 'do_sample' is not loaded"),
        ("target_language: missing, for source_language is given", "--to: missing, for --from is given"),
        ("text: is blank", "text: is blank"),
        ("/tmp/do_sample/top_k: No such file", "/tmp/do_sample/top_k: No such file"),
        ("", ""),
    ],
)
def test_fields_are_named_by_their_flags(message: str, told: str) -> None:
    assert in_flags(message) == in_flags(told) == told


def test_a_refusal_names_a_flag_or_the_text() -> None:
    for field in fields(Search):
        if field.name != "suppressed_tokens":
            assert in_flags(f"{field.name}: no") == f"{flag(field.name)}: no"
    assert str(refusal("text 3", "num_beams: 9 is not in 1 to 8")) == "--num-beams: 9 is not in 1 to 8"
    assert str(refusal("line 3", "target: more than max_new_tokens")) == "line 3: target: more than --max-new-tokens"
    assert denial("do_sample") == "--no-sample"


WHERE = "is `dragoman serve` running? --server names another"
SSL = "Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1:SSL routines:OPENSSL_internal:"
TLS = "the TLS handshake failed"
REFUSED = (
    "nothing answers there (Connection refused); is the server running?",
    f"nothing answers there (connection refused); {WHERE}",
)
NOT_GRPC = (
    "what answers there does not speak gRPC; is it the port of a Dragoman server?",
    "what answers there does not speak gRPC; --server names the gRPC port, not metrics'",
)
ANOTHER_NAME = (
    "the server's certificate is not for this name; call it by one that the certificate has",
    f"{TLS}: the certificate is for another name; --server-name says which it has",
)
CLOSED = "the connection was closed at once (%s); is it a Dragoman server, and does it want TLS or a client's certificate?"


def untrusted(why: str) -> str:
    return f"the server's certificate is not trusted ({why}); is it of the authority that was given?"


@pytest.mark.parametrize(
    ("cause", "told", "told_with_flags"),
    [
        ("Failed to connect to remote host: connect: Connection refused (111)", *REFUSED),
        ("connect failed: addr: ipv4:1.1.1.1:1 error: Connection refused", *REFUSED),
        (
            "Failed to connect to remote host: connect: No route to host (113)",
            "it cannot be reached (No route to host); is the address right?",
            f"it cannot be reached; {WHERE}",
        ),
        (
            f"{SSL}CERTIFICATE_VERIFY_FAILED: self signed: OK",
            untrusted("self signed"),
            f"{TLS}: the certificate is not trusted (self signed); --ca names the authority that it is of",
        ),
        (
            f"{SSL}CERTIFICATE_VERIFY_FAILED: certificate has expired",
            untrusted("certificate has expired"),
            f"{TLS}: the certificate has expired",
        ),
        (
            f"{SSL}WRONG_VERSION_NUMBER: Invalid certificate",
            "no TLS is spoken there; call it without credentials",
            f"{TLS}: the server speaks plain text; leave --ca out",
        ),
        (f"{SSL}SSLV3_ALERT: x", f"{TLS} (SSLV3_ALERT)", f"{TLS}: SSLV3_ALERT"),
        ("Peer name localhost is not in peer certificate", *ANOTHER_NAME),
        ("Custom verification check failed with error: Hostname Verification Check failed.", *ANOTHER_NAME),
        (
            "recvmsg:Connection reset by peer",
            CLOSED % "Connection reset by peer",
            "it closed the connection; where it asks for a certificate, --certificate and --key name ours",
        ),
        ("Trying to connect an http1.x server (HTTP status 400)", *NOT_GRPC),
        ("Failed parsing HTTP/2 (Trying to connect an http1.x server)", *NOT_GRPC),
        ("something unknown", None, None),
    ],
)
def test_a_server_that_is_not_reached_is_told_with_advice(cause: str, told: str | None, told_with_flags: str | None) -> None:
    for words in (
        f"connections to all backends failing; last error: UNKNOWN: ipv6:%5B::1%5D:8500: {cause}",
        f"failed to connect to all addresses; last error: ipv6:%5B::1%5D:8500: {cause}\n",
    ):
        assert explain(words) == (told and f"[::1]:8500: {told}")
        line = f"here:1: {told_with_flags}" if told_with_flags else f"{words} (UNAVAILABLE)"
        assert in_one_line(Unavailable(words), "here:1", is_tls=True) == line
        if told:
            assert in_one_line(Unavailable(told), "here:1", is_tls=True) == line


@pytest.mark.parametrize(
    ("words", "is_tls", "line"),
    [
        ("there: nothing answers there ([::1]:85: Connection refused); is", False, "nothing answers at [::1]:85 .*TLS, --ca turns"),
        ("there: nothing answers there ([::1]:85: Connection refused); is", True, "nothing answers at [::1]:85 .*--key name ours"),
        ("Socket closed", False, "it closed the connection; where it speaks TLS only, --ca turns that on"),
        ("unix:/run/x: connect: No such file or directory (2)", False, f"there is no such socket; {WHERE}"),
        ("errors resolving x:1: [address lookup failed]", False, f"the name is not known; {WHERE}"),
        ("x:1: the name cannot be looked up (Domain name not found)", False, f"the name is not known; {WHERE}"),
    ],
)
def test_advice_depends_on_whether_tls_was_spoken(words: str, is_tls: bool, line: str) -> None:
    pattern = re.escape(f"here:1: {line}").replace(re.escape(".*"), ".*")
    assert re.match(pattern, in_one_line(Unavailable(words), "here:1", is_tls))


def test_an_answer_of_the_server_is_told_in_flags() -> None:
    for error, line in {
        DeadlineExceeded("Deadline Exceeded"): "here:1: no answer in time (DEADLINE_EXCEEDED)",
        DeadlineExceeded("the deadline passed"): "the deadline passed (DEADLINE_EXCEEDED)",
        Unavailable("the server is draining"): "the server is draining (UNAVAILABLE)",
        ModelNotFound("model: 'x' is not loaded"): "--model: 'x' is not loaded (NOT_FOUND)",
        InvalidArgument("Connection refused"): "Connection refused (INVALID_ARGUMENT)",
        CallError("{strange}", code="ABORTED"): "{strange} (ABORTED)",
    }.items():
        assert in_one_line(error, "here:1", False) == line


def test_a_server_that_is_not_ready_is_told_apart_from_one_that_is_gone(server, service) -> None:
    for name, is_serving in {"": True, "en-de": True, "down": False}.items():
        server.set_health(name, is_serving)
    with Client(server.target, retry=RetryPolicy(max_attempts=1)) as client:

        def why(name: str = "") -> str:
            return why_not_serving(client, "here", name, is_tls=False)

        assert why() == why("en-de") == ""
        assert why("down") == "here: down is not serving, the server says"
        assert why("en-xx") == "here: no service 'en-xx'; there are liveness, readiness and the models by their names"
        assert why("\ud800").startswith("service: not Unicode text")
        server.set_health("", False)
        service.script.append(failing("UNAUTHENTICATED", "the token is missing"))
        assert why() == why() == "here: readiness is not serving, the server says"
        server.stop()
        assert why().startswith("here: nothing answers")


MODEL = ModelInfo("en-de", "3", True, "fp32", "cpu", 256, 200, 128, 64, 6000, 7000)
HEADINGS = ["model", "version", "ready", "precision", "device", "max source", "max target", "default new", "slots"]


def printed(*models: ModelInfo) -> tuple[list[list[str]], list[str]]:
    """Return the cells of the table, and the lines below it."""
    out = StringIO()
    print_models(models, out)
    assert out.getvalue().replace("\n", "").isprintable(), "a server cannot steer the terminal"
    lines = out.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in lines if line[0] in "┃│"]
    return rows, [line for line in lines if line[0].isalpha()]


def test_a_table_has_a_row_for_each_model_and_cuts_nothing() -> None:
    long = ModelInfo("[b]" + "long" * 30, "2026\x1b[2J", False, "int8", "cuda:0", 512, 511, 100, 8, 1, 2)
    plain = ["en-de", "3", "yes", "fp32", "cpu", "256", "200", "128", "64"]
    assert printed() == ([HEADINGS], [])
    cells = [long.name, "2026\ufffd[2J", "no", "int8", "cuda:0", "512", "511", "100", "8"]
    assert printed(MODEL, replace(long, architecture="transformer")) == ([HEADINGS, plain, cells], [])
    headings, first, second = printed(replace(MODEL, architecture="decoder"), replace(long, architecture="rnn"))[0]
    assert headings == [*HEADINGS[:3], "architecture", *HEADINGS[3:]]
    assert first == [*plain[:3], "decoder", *plain[3:]] and second[3] == "rnn"


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        ("en", "de fr", "en → de, fr"),
        ("de en fr", "de en fr", "de, en, fr"),
        ("a b c d", "e", "4: a, b, c, … → e"),
        ("", "de fr", "any → de, fr"),
        ("x\x1b[2J", "", "x\ufffd[2J → any"),
        ("", "", ""),
    ],
)
def test_languages_of_a_model_are_few_words(source: str, target: str, told: str) -> None:
    read, written = (tuple(Language(code) for code in codes.split(" ") if code) for codes in (source, target))
    other = replace(MODEL, source_languages=(Language("en"),))
    headings, first, _ = printed(replace(MODEL, source_languages=read, target_languages=written), other)[0]
    assert (headings[-1], first[-1]) == ("languages", told)


def test_other_properties_of_models_are_told_below_the_table() -> None:
    versions = (ModelVersion("4", "0123456789ab", ("canary",), 0.1), ModelVersion("3", "3", (), 0.9, True))
    values = {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True, "no_repeat_ngram_size": 0, "suppressed_tokens": (7,)}
    full = replace(MODEL, domain="short, [b]as in captions[/b]; " * 10 + "a\x1b]0;b", versions=versions, shortlist_tokens=512)
    full = replace(full, defaults=Defaults(**values), default_source_language="en")
    forced = replace(MODEL, name="b", defaults=Defaults(suppressed_tokens=(1, 2, 3), is_end_forced=True))
    alone, labelled = (replace(MODEL, versions=(ModelVersion("a", "a", labels, 1.0, True),)) for labels in ((), ("x",)))
    assert printed(full, forced, alone, labelled)[1] == [
        f"Domain of en-de: {'short, [b]as in captions[/b]; ' * 10}a\ufffd]0;b",
        "Versions of en-de: 4 (0123456789ab, canary, 10%); 3 (90%, default)",
        "Defaults of en-de: source_language en, num_beams 4, length_penalty 0.6, early_stopping true, no_repeat_ngram_size 0, "
        "suppressed_tokens [7]",
        "Shortlist of en-de: answers are chosen from 512 of 7000 tokens",
        "Defaults of b: 3 suppressed_tokens, end-of-sequence is forced",
        "Versions of en-de: a (x, 100%, default)",
    ]
    out: Any = StringIO()
    print_models([full, forced], out, is_json=True)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [json.loads(json.dumps(asdict(x))) for x in (full, forced)]
