"""Messages of the command line: failures in one line with flags for fields, and tables of models and of their versions."""

import json
from dataclasses import asdict, fields, replace
from io import StringIO

from dragoman.client.connection_failures import explain
from dragoman.client.errors import CallError, DeadlineExceeded, InvalidArgument, Unavailable
from dragoman.client.model_info import Defaults, Language, ModelInfo, ModelVersion
from dragoman.client.reach import in_one_line
from dragoman.client.repository import ModelStatus, Requested, VersionStatus
from dragoman.client.search import FLAG_FIELDS, Search, SearchOptions, denial, flag, flag_help, in_flags, refusal
from dragoman.client.tables import print_models, print_repository
from dragoman.v1 import generation_pb2


def test_fields_are_named_by_their_flags() -> None:
    for message, told in {
        "do_sample: does not go with num_beams above 1": "--sample: does not go with --num-beams above 1",
        "temperature: goes with top_k or temperature": "--temperature: goes with --top-k or temperature",
        "3 max_new_tokens of 510, max_target_tokens of en-de": "3 --max-new-tokens of 510, max_target_tokens of en-de",
        "model: 'do_sample' is not loaded": "--model: 'do_sample' is not loaded",
        "target_language: missing, for source_language is given": "--to: missing, for --from is given",
        "text: is blank": "text: is blank",
        "/tmp/do_sample/top_k: No such file": "/tmp/do_sample/top_k: No such file",
    }.items():
        assert in_flags(message) == in_flags(told) == told
    for name in FLAG_FIELDS:
        assert in_flags(f"{name}: no") == f"{flag(name)}: no" and flag_help(name)
    names = [field.name for field in fields(Search)]
    assert {*names} - {*FLAG_FIELDS} == {"suppressed_tokens"} and names == [*SearchOptions.__annotations__]
    others = [
        "text",
        "model",
        "model_version",
        "source_language",
        "target_language",
        "max_new_tokens",
        "truncate",
        "priority",
        "request_id",
    ]
    assert {*names, *others} == {*generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name}
    assert str(refusal("text 3", "num_beams: 9 is not in 1 to 8")) == "--num-beams: 9 is not in 1 to 8"
    assert str(refusal("line 3", "target: more than max_new_tokens")) == "line 3: target: more than --max-new-tokens"
    assert denial("do_sample") == "--no-sample"


SSL = "Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1:SSL routines:OPENSSL_internal:"
# The cause as gRPC words it, and what the client and the command line say of it.
CAUSES = {
    "Failed to connect to remote host: connect: Connection refused (111)": ("nothing answers there", "connection refused"),
    "connect failed: addr: ipv4:1.1.1.1:1 error: Connection refused": ("nothing answers there", "connection refused"),
    "Failed to connect to remote host: connect: No route to host (113)": ("cannot be reached (No route", "cannot be reached"),
    f"{SSL}CERTIFICATE_VERIFY_FAILED: self signed: OK": ("not trusted (self signed)", "not trusted (self signed); --ca"),
    f"{SSL}CERTIFICATE_VERIFY_FAILED: certificate has expired": ("not trusted", "the certificate has expired"),
    f"{SSL}WRONG_VERSION_NUMBER: Invalid certificate": ("no TLS is spoken", "plain text; leave --ca out"),
    f"{SSL}SSLV3_ALERT: x": ("TLS handshake failed (SSLV3_ALERT)", "TLS handshake failed: SSLV3_ALERT"),
    "Peer name localhost is not in peer certificate": ("not for this name", "--server-name"),
    "Custom verification check failed with error: Hostname Verification Check failed.": ("not for this name", "--server-name"),
    "recvmsg:Connection reset by peer": ("closed at once (Connection reset by peer)", "--certificate and --key name ours"),
    "Trying to connect an http1.x server (HTTP status 400)": ("does not speak gRPC", "--server names the gRPC port"),
    "Failed parsing HTTP/2 (Trying to connect an http1.x server)": ("does not speak gRPC", "--server names the gRPC port"),
}


def test_a_server_that_is_not_reached_is_told_with_advice() -> None:
    for start in (
        "connections to all backends failing; last error: UNKNOWN: ipv6:%5B::1%5D:8500: ",
        "failed to connect to all addresses; last error: ipv6:%5B::1%5D:8500: ",
    ):
        for cause, (told, told_with_flags) in CAUSES.items():
            explained, line = explain(start + cause), in_one_line(Unavailable(start + cause), "here:1", is_tls=True)
            assert explained.startswith("[::1]:8500: ") and told in explained
            assert line.startswith("here:1: ") and told_with_flags in line
            assert in_one_line(Unavailable(explained), "here:1", is_tls=True) == line
        assert explain(f"{start}something unknown") is None
    assert explain("DNS resolution failed for nobody:8500: C-ares: Domain name not found") == (
        "nobody:8500: the name cannot be looked up (Domain name not found); is it right?"
    )
    for details in ("", "Socket closed", "draining", "DNS resolution failed"):
        assert explain(details, "localhost:8500") is None


def test_a_failed_call_is_told_in_flags() -> None:
    elsewhere = Unavailable("there: nothing answers there ([::1]:85: Connection refused); is")
    for error, is_tls, told in (
        (elsewhere, False, "here:1: nothing answers at [::1]:85 (connection refused)"),
        (elsewhere, True, "here:1: nothing answers at [::1]:85 (connection refused)"),
        (Unavailable("Socket closed"), False, "here:1: it closed the connection; where it speaks TLS only, --ca"),
        (Unavailable("unix:/run/x: connect: No such file or directory (2)"), False, "here:1: there is no such socket"),
        (Unavailable("errors resolving x:1: [address lookup failed]"), False, "here:1: the name is not known"),
        (DeadlineExceeded("Deadline Exceeded"), False, "here:1: no answer in time (DEADLINE_EXCEEDED)"),
        (DeadlineExceeded("the deadline passed"), False, "the deadline passed (DEADLINE_EXCEEDED)"),
        (Unavailable("something unknown"), False, "something unknown (UNAVAILABLE)"),
        (InvalidArgument("do_sample: Connection refused"), False, "--sample: Connection refused (INVALID_ARGUMENT)"),
        (CallError("{strange}", code="ABORTED"), False, "{strange} (ABORTED)"),
    ):
        assert in_one_line(error, "here:1", is_tls).startswith(told)


MODEL = ModelInfo("en-de", "3", True, "fp32", "cpu", 256, 200, 128, 64, 6000, 7000)
HEADINGS = ["model", "version", "ready", "precision", "device", "max source", "max target", "default new", "slots"]


def printed(out: StringIO) -> tuple[list[list[str]], list[str]]:
    """Return the cells of a table, and the lines below it."""
    assert out.getvalue().replace("\n", "").isprintable(), "a server cannot steer the terminal"
    lines = out.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in lines if line[0] in "┃│"]
    return rows, [line for line in lines if line[0].isalpha()]


def table(*models: ModelInfo) -> tuple[list[list[str]], list[str]]:
    print_models(models, out := StringIO())
    return printed(out)


def test_a_table_has_a_row_for_each_model_and_cuts_nothing() -> None:
    long = ModelInfo("[b]" + "long" * 30, "2026\x1b[2J", False, "int8", "cuda:0", 512, 511, 100, 8, 1, 2)
    plain = ["en-de", "3", "yes", "fp32", "cpu", "256", "200", "128", "64"]
    assert table() == ([HEADINGS], [])
    cells = [long.name, "2026\ufffd[2J", "no", "int8", "cuda:0", "512", "511", "100", "8"]
    assert table(MODEL, replace(long, architecture="transformer")) == ([HEADINGS, plain, cells], [])
    headings, first, second = table(replace(MODEL, architecture="decoder"), replace(long, architecture="rnn"))[0]
    assert headings == [*HEADINGS[:3], "architecture", *HEADINGS[3:]]
    assert first == [*plain[:3], "decoder", *plain[3:]] and second[3] == "rnn"
    assert table(replace(MODEL, num_engines=2, num_threads=1, num_lone_threads=1))[1] == ["Engines of en-de: 2, threads of each: 1"]
    assert table(replace(MODEL, num_engines=1, num_threads=2, num_lone_threads=4))[1][0].endswith(
        "of each: 2, 4 for a lone request"
    )
    other = replace(MODEL, source_languages=(Language("en"),))
    for source, target, told in (
        ("en", "de fr", "en → de, fr"),
        ("de en fr", "de en fr", "de, en, fr"),
        ("a b c d", "e", "4: a, b, c, … → e"),
        ("", "de fr", "any → de, fr"),
        ("x\x1b[2J", "", "x\ufffd[2J → any"),
        ("", "", ""),
    ):
        read, written = (tuple(Language(code) for code in codes.split(" ") if code) for codes in (source, target))
        headings, first, _ = table(replace(MODEL, source_languages=read, target_languages=written), other)[0]
        assert (headings[-1], first[-1]) == ("languages", told)


def test_other_properties_of_models_are_told_below_the_table() -> None:
    versions = (ModelVersion("4", "0123456789ab", ("canary",), 0.1), ModelVersion("3", "3", (), 0.9, True))
    values = {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True, "no_repeat_ngram_size": 0, "suppressed_tokens": (7,)}
    full = replace(MODEL, domain="short, [b]as in captions[/b]; " * 10 + "a\x1b]0;b", versions=versions, shortlist_tokens=512)
    full = replace(full, defaults=Defaults(**values), default_source_language="en")
    forced = replace(MODEL, name="b", defaults=Defaults(suppressed_tokens=(1, 2, 3), is_end_forced=True))
    alone, labelled = (replace(MODEL, versions=(ModelVersion("a", "a", labels, 1.0, True),)) for labels in ((), ("x",)))
    assert table(full, forced, alone, labelled)[1] == [
        f"Domain of en-de: {'short, [b]as in captions[/b]; ' * 10}a\ufffd]0;b",
        "Versions of en-de: 4 (0123456789ab, canary, 10%); 3 (90%, default)",
        "Defaults of en-de: source_language en, num_beams 4, length_penalty 0.6, early_stopping true, no_repeat_ngram_size 0, "
        "suppressed_tokens [7]",
        "Shortlist of en-de: answers are chosen from 512 of 7000 tokens",
        "Defaults of b: 3 suppressed_tokens, end-of-sequence is forced",
        "Versions of en-de: a (x, 100%, default)",
    ]
    print_models([full, forced], out := StringIO(), is_json=True)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [json.loads(json.dumps(asdict(x))) for x in (full, forced)]


STATUS = ModelStatus(
    "en-de",
    True,
    (
        VersionStatus("3", "0123456789ab", "trial", 1000.5, "", "", ("canary", "new"), 0.125, True, 2**40, 7),
        VersionStatus("2", "", "refused", 0.0, "proof", "\x1b[2J no"),
        VersionStatus("1", state="unspecified"),
    ),
    ("labels.old: there is no version '9'",),
    Requested(False, ("1",), ("4",), "3", {"x": "", "a": "3"}),
    ("house", "legal"),
)


def test_versions_are_rows_with_reasons_below_them() -> None:
    unloaded = ModelStatus("fr-en", requested=Requested(is_unloaded=True))
    print_repository([STATUS, unloaded], out := StringIO(), clock=lambda: 1000.5 + 3 * 3600)
    rows, remarks = printed(out)
    assert rows[1:] == [
        ["en-de", "3 (default)", "0123456789ab", "trial", "3h ago", "canary, new", "12.5%", str(2**40), "7"],
        ["en-de", "2", "", "refused", "", "", "", "0", "0"],
        ["en-de", "1", "", "unspecified", "", "", "", "0", "0"],
        ["fr-en", "", "", "no version", "", "", "", "", ""],
    ]
    assert remarks == [
        "en-de 2: proof: \ufffd[2J no",
        "en-de: labels.old: there is no version '9'",
        "en-de: glossaries: house, legal",
        "en-de: asked for by operators: rolled back to 3, load 1, unload 4, label a = 3, label x = none",
        "fr-en: asked for by operators: unloaded",
    ]
    print_repository([STATUS, STATUS], out := StringIO(), is_json=True)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [json.loads(json.dumps(asdict(STATUS)))] * 2
    for seconds, told in ((-5, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (2 * 86400, "2d"), (2e5, "2d")):
        model = ModelStatus("m", versions=(VersionStatus("1", since=100.0),))
        print_repository([model], out := StringIO(), clock=lambda s=seconds: 100.0 + s)
        assert f" {told} ago " in out.getvalue()
