"""Callers: the file that names them, how they are recognised, and their limits of rates, tokens and concurrency."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.config import ConfigError
from dragoman.server.errors import InvalidRequest, LimitReached, Unauthenticated
from dragoman.server.listening import digest_of
from dragoman.server.service.callers import Caller, Callers
from dragoman.server.service.callers_file import read_book
from dragoman.server.telemetry.families import Families
from dragoman.server.telemetry.server_metrics import MAX_CALLERS, OTHERS, CallerMetrics

# The file


def write(folder: Path, text: str, name: str = "tokens") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_book(path)
    assert all(line.startswith(f"auth_tokens_file: {path}") for line in str(caught.value).splitlines())
    assert "words" not in str(caught.value), "tokens are not quoted"
    return str(caught.value)


def test_a_token_may_have_any_printable_character_anywhere(tmp_path: Path) -> None:
    """A colon used to end the name wherever the last one was, so that a part of the token was accepted, and the rest logged."""
    for character in map(chr, range(33, 127)):
        for token in (f"a{character}b", f"{character}b", f"a{character}"):
            assert read_book(write(tmp_path, f"web:{token}\n")).tokens == {digest_of(token): "web"}


def test_lines_and_toml_name_callers(tmp_path: Path) -> None:
    """In lines the name ends at the first colon; TOML has defaults, digests, and any file name."""
    book = read_book(write(tmp_path, "web:1x1:2x2\nshop: three \nfour\n\n  # no:token\nweb:new\n"))
    tokens = {"1x1:2x2": "web", "three": "shop", "four": "line 3", "new": "web"}
    assert book.tokens == {digest_of(token): name for token, name in tokens.items()}
    [warning] = book.warnings
    assert "line 1" in warning and "1x1" not in warning and "2x2" not in warning
    digest = hashlib.sha256(b"s3cret").hexdigest().upper()
    text = (
        f'[defaults]\nmax_slots = 4\nrequests_per_second = 2\n[callers.a]\ntoken_sha256 = "{digest}"\nmax_slots = 8\n'
        '[callers.b]\ntoken="y"\nrequests_burst=9'
    )
    for name in ("callers.toml", "secret"):
        book = read_book(write(tmp_path, text, name))
        assert book.tokens == {digest_of("s3cret"): "a", digest_of("y"): "b"}
        a, b = (book.entries[name].limits for name in "ab")
        assert (a.max_slots, a.requests_per_second, b.max_slots, b.requests_burst) == (8, 2, 4, 9)
    assert read_book(write(tmp_path, "callers=3\n")).tokens == {digest_of("callers=3"): "line 1"}, "TOML by chance"


WEB = '[callers.web]\ntoken = "words"\n'
BAD_LINES = [
    ("", "holds no token"),
    ("# only this\n", "holds no token"),
    ("a:one\nb: \n", "line 2: a token is printable"),
    *[(line, "line 1: a token is printable") for line in ("two words", "x:clé", "x:" + "y" * 4097)],
    (":one", "line 1: no name"),
    ("a:one\nb:one", "line 2: the same token"),
    ("n" * 65 + ":words", "line 1: a name is at most 64"),
    ("a\x01b:words", "line 1: a name is at most 64 printable"),
    (f"{WEB}=", "line 1: looks like TOML"),
    ('[defaults]\ntoken="words', "line 1: looks like TOML"),
]
BAD_TOML = [
    ("", "callers: is missing"),
    ("callers = 3", "callers: "),
    ("[callers]", "callers: "),
    *[(f"[callers.web]\n{rest}", "callers.web: has neither a token nor a certificate") for rest in ("", "tokens = []")],
    (WEB + "[other]", "other: unknown key"),
    (WEB + "tokns = 3", "callers.web.tokns: unknown key"),
    ('[callers.web]\ntoken = "two words"', "callers.web.token: a token is 1 to 4096 printable"),
    ('[callers.web]\ntokens = ["words", ""]', "callers.web.tokens.1: a token is"),
    ('[callers.web]\ntoken = ["words"]', "callers.web.token: "),
    ('[callers.web]\ntoken_sha256 = "words"', "callers.web.token_sha256: a SHA-256 digest is 64"),
    *[(f'[callers."{name}"]\ntoken = "words"', "a name is 1 to 64 letters") for name in ("a b", "n" * 65, "../x")],
    (WEB + '[callers.shop]\ntoken = "words"', "callers.shop: the same token as before, of web"),
    *[(WEB + f"requests_per_second = {rate}", "callers.web.requests_per_second: ") for rate in ("0", "nan", "inf", "true")],
    *[(WEB + f"max_requests = {count}", "callers.web.max_requests: ") for count in ("1.5", '"words"', str(10**30))],
    *[(WEB + f"{key} = {value}", f"callers.web.{key}: ") for key, value in (("max_slots", 0), ("weight", 0), ("max_priority", 11))],
    (WEB + "max_deadline_seconds = -1", "callers.web.max_deadline_seconds: "),
    (WEB + 'models = "words"', "callers.web.models: "),
    (WEB + "requests_burst = 5", "callers.web: requests_burst is set without requests_per_second"),
    (WEB + "expires = 2030-01-31", "callers.web.expires: "),
    (WEB + "expires = 2030-01-31T00:00:00", "callers.web.expires: needs an offset"),
    (WEB + 'certificates = ["a", "a"]', "callers.web: the same certificate as before"),
    (WEB + 'certificates = ["web.example.org"]', "certificates is set, and tls_client_ca is not"),
    ("[defaults]\ntoken = 'words'\n" + WEB, "defaults.token: unknown key"),
    ("[defaults]\nexpires = 2030-01-31T00:00:00Z\n" + WEB, "defaults.expires: unknown key"),
    ("words", "not a TOML file"),
    ("a = " + "[" * 100_000, "auth_tokens_file"),
]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [*(("tokens", *row) for row in BAD_LINES), *(("callers.toml", *row) for row in BAD_TOML)],
    ids=lambda text: text[:48],
)
def test_bad_entries_are_named_without_quoting_them(tmp_path: Path, name: str, content: str, reason: str) -> None:
    assert reason in refused(write(tmp_path, content, name))


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "huge", "bytes", "two mistakes"])
def test_unreadable_files_are_refused_and_all_mistakes_are_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "callers.toml"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "huge":
            with path.open("wb") as file:
                file.truncate(2**34)
        case "bytes":
            path.write_bytes(b"\xff\xfe")
        case "two mistakes":
            path.write_text(WEB + "max_slots = 0\nweight = -1\n")
    message = refused(path)
    assert kind != "two mistakes" or ("callers.web.max_slots: " in message and "callers.web.weight: " in message)


# Callers of one process


class World:
    """A file of callers, what is made of it, and the time."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds, self.registry = path, 1000.0, CollectorRegistry()
        self.callers: Any = None

    def write(self, text: str) -> None:
        """Change the file and read it."""
        self.path.write_text(text)
        book = read_book(self.path, has_client_certificates=True)
        if self.callers is None:
            self.callers = Callers(book, CallerMetrics(Families(self.registry)), clock=self._now, wall_clock=self._now)
        else:
            self.callers.replace(book)

    def _now(self) -> float:
        return self.seconds

    def caller(self, token: str = "s3cret") -> Caller:
        caller: Caller = self.callers.identify([("authorization", f"Bearer {token}")])
        return caller

    def limited(self, limits: str) -> Caller:
        self.write(f'[callers.web]\ntoken = "s3cret"\n{limits}\n')
        return self.caller()

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"dragoman_caller_{name}", labels)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "callers.toml")


def refusal(caller: Caller) -> tuple[str, float]:
    """Return the limit and the seconds after which to come back."""
    with pytest.raises(LimitReached) as caught:
        caller.enter()
    assert caught.value.code == "RESOURCE_EXHAUSTED" and caught.value.message.startswith(f"{caught.value.limit}: ")
    return caught.value.limit, pytest.approx(caught.value.retry_after_seconds, abs=1e-2)  # type: ignore[return-value]


BEARER = ("authorization", "Bearer s3cret")


@pytest.mark.parametrize(
    ("metadata", "names", "name"),
    [
        ([BEARER], [], "shop"),
        ([("authorization", "bearer s3cret"), ("other", "x")], [], "shop"),
        ([BEARER, BEARER], [], None),
        *[
            ([("authorization", value)], [], None)
            for value in (b"Bearer s3cret", "Bearer \ud800", "Bearer ", "Bearer", "Basic s3cret")
        ],
        *[([("authorization", value)], [], None) for value in ("s3cret", "Bearer s3cret ", "Bearer shop:s3cret")],
        (None, [], None),
        ([], ["web.example.org"], "web"),
        ([], ["unknown", "spiffe://a/b"], "web"),
        ([BEARER], ["web.example.org"], "shop"),
        ([], ["WEB.example.org", "x.web.example.org", "*.example.org", ""], None),
        ([("authorization", "Bearer wrong")], ["web.example.org"], None),
    ],
)
def test_a_caller_has_one_known_token_or_else_a_certificates_name(world: World, metadata: Any, names: Any, name: Any) -> None:
    world.write(
        '[callers.web]\ncertificates = ["web.example.org", "spiffe://a/b"]\n[callers.shop]\ntoken = "s3cret"\ntokens = ["new"]'
    )
    assert world.caller("new") is world.caller()
    if name is not None:
        assert world.callers.identify(metadata, names).name == name
    else:
        with pytest.raises(Unauthenticated, match="token or a client certificate"):
            world.callers.identify(metadata, names)


def test_requests_come_at_their_rate_and_in_bursts(world: World) -> None:
    web = world.limited("requests_per_second = 2\nrequests_burst = 3")
    for wait in (0.0, 0.5, 100.0):
        world.seconds += wait
        for _ in range(1 if wait == 0.5 else 3):
            web.enter()
        for _ in range(100):
            assert refusal(web) == ("requests_per_second", 0.5), "a refused request takes nothing"
    slow = world.limited("requests_per_second = 0.1\nrequests_burst = 1")
    world.seconds += 100
    slow.enter()
    assert refusal(slow) == ("requests_per_second", 10.0)


def test_background_requests_leave_half_of_each_limit_to_others(world: World) -> None:
    for limits, num in (("requests_per_second = 1\nrequests_burst = 8", 5), ("max_requests = 8", 4), ("max_requests = 1", 1)):
        web = world.limited(limits)
        for _ in range(num):
            web.enter(is_background=True)
        with pytest.raises(LimitReached):
            web.enter(is_background=True)
        for _ in range(8 - num if num > 1 else 0):
            web.enter()
        for _ in range(8 if num > 1 else 1):
            web.leave(0)
    web = world.limited("tokens_per_second = 10\ntokens_burst = 50")
    web.read(30)
    with pytest.raises(LimitReached) as caught:
        web.enter(is_background=True)
    assert caught.value.retry_after_seconds == 0.5
    web.enter()


def test_used_tokens_are_owed_also_when_the_file_changes(world: World) -> None:
    web = world.limited("tokens_per_second = 10\ntokens_burst = 50")
    web.enter()
    web.read(30)
    web.leave(generated_tokens=120)
    assert refusal(web) == ("tokens_per_second", 10.0)
    world.seconds += 9.9
    refusal(web)
    world.seconds += 0.2
    web.enter()
    web.read(1000)
    world.limited("tokens_per_second = 100\ntokens_burst = 50")
    assert refusal(web) == ("tokens_per_second", 9.99)


def test_requests_and_streams_under_way_are_bounded_apart(world: World) -> None:
    web = world.limited("max_requests = 2\nmax_priority = 2\nmax_slots = 4\nweight = 2.5\nmax_waiting = 7")
    for enter in (web.enter, web.enter, web.enter_stream, web.enter_stream):
        enter()
    assert refusal(web) == ("max_requests", 1.0) and world.count("requests_running", caller="web") == 2
    with pytest.raises(LimitReached, match="max_requests: 2 streams are open"):
        web.enter_stream()
    with pytest.raises(InvalidRequest, match=r"priority: 3 is above 2, max_priority of caller web"):
        web.check_priority(3)
    with pytest.raises(InvalidRequest, match=r"num_beams: 5 slots are needed; max_slots of caller web is 4"):
        web.check_slots(5, "num_beams")
    web.check_priority(2)
    web.check_slots(4, "num_beams")
    assert world.count("refusals_total", caller="web", limit="max_priority") == 1
    assert (web.share.caller, web.share.weight, web.share.max_slots, web.share.max_waiting) == ("web", 2.5, 4, 7)
    web.leave(0)
    web.leave_stream()
    web.enter()
    web.enter_stream()


def test_an_expired_caller_is_told_so(world: World) -> None:
    web = world.limited("expires = 1970-01-01T01:00:00Z")
    web.enter()
    world.seconds = 3600
    for enter in (world.caller, web.enter):
        with pytest.raises(Unauthenticated, match="caller 'web' expired at 1970-01-01T01:00:00Z"):
            enter()
    web.leave(0)


def test_a_change_of_the_file_keeps_what_was_used_and_ends_callers_that_are_gone(world: World) -> None:
    web = world.limited("requests_per_second = 1\nrequests_burst = 2\nmax_requests = 5")
    web.enter()
    web.enter()
    assert world.limited("requests_per_second = 1\nrequests_burst = 9\nmax_requests = 2") is web
    assert refusal(web)[0] == "max_requests"
    web.leave(0)
    assert refusal(web)[0] == "requests_per_second"
    world.seconds += 2
    web.enter()
    world.write('[callers.shop]\ntoken = "0ther"')
    for enter in (world.caller, web.enter):
        with pytest.raises(Unauthenticated):
            enter()
    web.leave(5)
    assert (world.count("requests_total", caller="web"), world.count("requests_total", caller="shop")) == (None, 0)


def test_callers_beyond_the_number_of_labels_share_one(world: World) -> None:
    names = [f"c{i}" for i in range(MAX_CALLERS + 2)]
    world.write("".join(f'[callers.{name}]\ntoken = "{name}"\n' for name in names))
    for name in names:
        world.caller(name).enter()
    assert [world.count("requests_total", caller=name) for name in ("c0", OTHERS, names[-1])] == [1, 2, None]
    world.write("".join(f'[callers.{name}]\ntoken = "{name}"\n' for name in [*names[1:], "new"]))
    assert [world.count("requests_total", caller=name) for name in ("c0", "new")] == [None, 0]
