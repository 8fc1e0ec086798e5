"""The table of attacks, and what attackers write by hand; the attacks themselves take minutes and are no tests."""

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attacks.attack import Attack, Figure, Scene, percentile, seconds
from benchmarks.attacks.counting import counted, listed
from benchmarks.attacks.http2 import (
    ACK,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    SETTINGS,
    Connection,
    frame,
    header_block,
    split_frames,
)
from benchmarks.attacks.main import ATTACKS, attack_with, merge
from benchmarks.attacks.manifests import describe
from benchmarks.attacks.others import Pace

FIRST, SECOND = ATTACKS[0], ATTACKS[1]


def test_every_attack_has_a_name_and_a_title_of_its_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len({attack.title for attack in ATTACKS}) == len(ATTACKS) == 16


def test_the_sides_of_a_figure_stand_in_one_row() -> None:
    rows = merge([], "before", FIRST, [Figure("end, s", "96")])
    rows = merge(rows, "after", FIRST, [Figure("end, s", "5")])
    assert rows == [{"attack": FIRST.title, "figure": "end, s", "before": "96", "after": "5"}]


def test_an_attack_that_is_repeated_replaces_its_side_and_nothing_else() -> None:
    rows = merge([], "before", FIRST, [Figure("a", "1"), Figure("only then", "2")])
    rows = merge(rows, "after", FIRST, [Figure("a", "3")])
    rows = merge(rows, "after", SECOND, [Figure("a", "4")])
    rows = merge(rows, "before", FIRST, [Figure("a", "5")])
    assert rows == [
        {"attack": FIRST.title, "figure": "a", "before": "5", "after": "3"},
        {"attack": SECOND.title, "figure": "a", "before": "—", "after": "4"},
    ]


def test_attacks_stay_in_their_order_whichever_was_first() -> None:
    rows = merge(merge([], "after", SECOND, [Figure("b", "1")]), "after", FIRST, [Figure("a", "2")])
    assert [row["attack"] for row in rows] == [FIRST.title, SECOND.title]


def test_an_attack_that_fails_keeps_what_it_had_found(capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: Scene) -> Iterator[Figure]:
        yield Figure("first", "1")
        raise TimeoutError

    figures = attack_with(Attack("x", "X", run), Scene(Path(), Path()))
    assert figures == [Figure("first", "1"), Figure("ended with", "TimeoutError")]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "text"), [(None, "more than 30"), (0.004, "0.00"), (9.876, "9.88"), (12.34, "12.3")])
def test_times_are_short_and_what_never_happened_is_said(value: float | None, text: str) -> None:
    assert seconds(value, 30) == text


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], percent) for percent in (0, 50, 51, 99, 100)] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert percentile([], 50) != percentile([], 50), "there is none"
    assert Pace(10, [0.001, 0.001, 0.5]).longest_ms == 500


def test_failures_are_added_up_by_code() -> None:
    text = """# TYPE dragoman_requests_failed_total counter
dragoman_requests_failed_total{code="CANCELLED",model="a"} 2.0
dragoman_requests_failed_total{code="CANCELLED",model=""} 1.0
dragoman_requests_failed_total{code="DEADLINE_EXCEEDED",model="a"} 5.0
dragoman_requests_failed_created{code="CANCELLED",model="a"} 1.7e9
"""
    assert counted(text) == {"CANCELLED": 3, "DEADLINE_EXCEEDED": 5}
    assert listed(counted(text)) == "CANCELLED 3, DEADLINE_EXCEEDED 5" and listed(Counter()) == "none"


@pytest.mark.parametrize(
    ("code", "text", "words"),
    [
        (2, "bundle.json: name: bad\n", "exit 2 after 1.2 s, 1 lines, 23 characters"),
        (1, "Traceback (most recent call last):\n", "exit 1 after 1.2 s, a traceback"),
        (None, '{"event":"serving"}', "serves after 1.2 s"),
        (None, "", "no end in 1.2 s"),
    ],
)
def test_how_a_command_ended_is_told_in_words(code: int | None, text: str, words: str) -> None:
    assert describe(code, 1.2, text) == words


def test_frames_are_read_as_they_were_written_and_parts_of_one_wait() -> None:
    data = frame(PING, 0, 0, b"12345678") + frame(HEADERS, 4, 7, b"abc")
    frames, rest = split_frames(data + data[:5])
    assert frames == [(PING, 0, 0, b"12345678"), (HEADERS, 4, 7, b"abc")] and rest == data[:5]


@pytest.mark.parametrize("size", [1, 126, 127, 128, 254, 255, 5000])
def test_lengths_of_headers_are_those_of_hpack(size: int) -> None:
    """RFC 7541, 5.1: what does not fit into seven bits goes on in bytes of seven bits each, the lowest first."""
    block = header_block({"k": "v" * size})
    assert block[:3] == b"\0\1k" and block.endswith(b"v" * size)
    length = block[3:-size]
    value = length[0] if length[0] < 127 else 127 + sum((byte & 127) << 7 * i for i, byte in enumerate(length[1:]))
    assert value == size


def test_a_connection_says_hello_and_answers_what_keeps_it_alive() -> None:
    heard: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(frame(SETTINGS, 0, 0) + frame(PING, 0, 0, b"are you?"))
                data = b""
                while len(split_frames(data.removeprefix(PREFACE))[0]) < 3:
                    data += peer.recv(1000)
                assert data.startswith(PREFACE)
                heard.extend(split_frames(data.removeprefix(PREFACE))[0])

        server = threading.Thread(target=serve)
        server.start()
        with Connection(f"127.0.0.1:{listener.getsockname()[1]}", {INITIAL_WINDOW_SIZE: 0}) as connection:
            server.join(30)
            assert connection.is_closed.wait(30), "it notices that the other side has gone"
    assert heard == [(SETTINGS, 0, 0, b"\0\4\0\0\0\0"), (SETTINGS, ACK, 0, b""), (PING, ACK, 0, b"are you?")]
