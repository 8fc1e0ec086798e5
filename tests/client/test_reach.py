"""Against what gRPC says (1.75 and 1.85) and what the client makes of it; tests of the command line have real servers."""

import pytest

from dragoman.client.errors import CallError, DeadlineExceeded, InvalidArgument, ModelNotFound, Unavailable
from dragoman.client.reach import in_one_line

FAILING = "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:85:"
HANDSHAKE = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
UNTRUSTED = "the certificate is not trusted (unable to get local issuer certificate); --ca names the authority that it is of"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (f"{FAILING} Failed to connect to remote host: Connection refused", "nothing answers there (connection refused); is"),
        ("failed to connect to all addresses; last error: UNKNOWN: connect: Connection refused (111)", "nothing answers there ("),
        ("there: nothing answers there (Connection refused); is the server running?", "nothing answers there (connection"),
        ("UNAVAILABLE: unix:/run/x: connect: No such file or directory (2)", "there is no such socket; is"),
        ("errors resolving x:1: [field:hostname lookup error:address lookup failed]", "the name is not known; is"),
        ("DNS resolution failed for x:1: C-ares status is not ARES_SUCCESS", "the name is not known; is"),
        ("x:1: the name cannot be looked up (Domain name not found); is it right?", "the name is not known; is"),
        (
            f"{FAILING} Custom verification check failed with error: Hostname Verification Check failed.",
            "the TLS handshake failed: ",
        ),
        ("Peer name x is not in peer certificate", "the TLS handshake failed: the certificate is for another name"),
        ("the server's certificate is not for this name", "the TLS handshake failed: the certificate is for another name"),
        (f"{HANDSHAKE}CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK", UNTRUSTED),
        ("the server's certificate is not trusted (unable to get local issuer certificate); is it", UNTRUSTED),
        (f"{HANDSHAKE}CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "handshake failed: the certificate has expired"),
        (f"{HANDSHAKE}WRONG_VERSION_NUMBER: Invalid certificate", "the server speaks plain text; leave --ca out"),
        ("no TLS is spoken there; call it without credentials", "the server speaks plain text; leave --ca out"),
        (f"{HANDSHAKE}TLSV1_ALERT_UNKNOWN_CA: OK", "the TLS handshake failed: TLSV1_ALERT_UNKNOWN_CA"),
        ("there: the TLS handshake failed (TLSV1_ALERT_UNKNOWN_CA)", "the TLS handshake failed: TLSV1_ALERT_UNKNOWN_CA"),
        (f"{FAILING} Failed parsing HTTP/2 (Trying to connect an http1.x server)", "does not speak gRPC; --server"),
        ("what answers there does not speak gRPC; is it the port", "does not speak gRPC; --server"),
        (f"{FAILING} connect: No route to host (113)", "it cannot be reached; is"),
    ],
)
def test_why_a_server_was_not_reached_is_told_with_what_to_do(message: str, told: str) -> None:
    line = in_one_line(Unavailable(message), "here:1", is_tls=True)
    assert line.startswith("here:1: ") and told in line and "\n" not in line


@pytest.mark.parametrize("message", ["Socket closed", "recvmsg:Connection reset by peer", "the connection was closed at once (x)"])
@pytest.mark.parametrize(("is_tls", "flag"), [(True, "--certificate and --key"), (False, "--ca ")])
def test_a_connection_that_is_closed_may_want_other_tls(message: str, is_tls: bool, flag: str) -> None:
    line = in_one_line(Unavailable(message), "here:1", is_tls)
    assert line.startswith("here:1: it closed the connection") and flag in line


def test_silence_is_told_apart_from_a_deadline_that_the_server_tells() -> None:
    assert in_one_line(DeadlineExceeded("Deadline Exceeded"), "here:1", False) == "here:1: no answer in time (DEADLINE_EXCEEDED)"
    told = DeadlineExceeded("the deadline passed before the answer was complete")
    assert in_one_line(told, "here:1", False) == "the deadline passed before the answer was complete (DEADLINE_EXCEEDED)"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Unavailable("the server is draining"), "the server is draining (UNAVAILABLE)"),
        (ModelNotFound("model: 'x' is not loaded"), "--model: 'x' is not loaded (NOT_FOUND)"),
        (InvalidArgument("do_sample: no"), "--sample: no (INVALID_ARGUMENT)"),
        (CallError("{strange}", code="ABORTED"), "{strange} (ABORTED)"),
    ],
)
def test_what_the_server_says_is_said_in_flags(error: CallError, line: str) -> None:
    assert in_one_line(error, "here:1", False) == line


@pytest.mark.parametrize(("is_tls", "advice"), [(False, "where it speaks TLS, --ca"), (True, "--certificate and --key name ours")])
def test_of_a_name_with_several_addresses_the_one_that_refused_is_told(is_tls: bool, advice: str) -> None:
    """Behind another one there may be a server that wants TLS, of which gRPC says nothing."""
    told = in_one_line(
        Unavailable("localhost:85: nothing answers there ([::1]:85: Connection refused); is"), "localhost:85", is_tls
    )
    assert told.startswith("localhost:85: nothing answers at [::1]:85 (connection refused); is") and advice in told
