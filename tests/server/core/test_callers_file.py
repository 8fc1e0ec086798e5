"""The file of callers: what it may say, and that what is wrong is named without quoting a token."""

import hashlib
import os
from pathlib import Path

import pytest

from dragoman.server.config import ConfigError
from dragoman.server.core.callers_file import digest_of, read_book

PRINTABLE = [chr(code) for code in range(33, 127)]


def write(folder: Path, text: str, name: str = "tokens") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_book(path)
    assert all(line.startswith(f"auth_tokens_file: {path}") for line in str(caught.value).splitlines())
    return str(caught.value)


def whose(path: Path, token: str) -> str | None:
    return read_book(path).tokens.get(digest_of(token))


@pytest.mark.parametrize("character", PRINTABLE)
def test_a_token_may_have_any_printable_character_anywhere(tmp_path: Path, character: str) -> None:
    """A colon used to end the name wherever the last one was, so that a part of the token was accepted, and the rest logged."""
    for token in (f"a{character}b", f"{character}b", f"a{character}"):
        path = write(tmp_path, f"web:{token}\n")
        assert read_book(path).tokens == {digest_of(token): "web"}
        quoted = token.replace("\\", "\\\\").replace('"', '\\"')
        path = write(tmp_path, f'[callers.web]\ntoken = "{quoted}"\n', "tokens.toml")
        assert read_book(path).tokens == {digest_of(token): "web"}


def test_the_first_colon_separates_and_more_of_them_are_warned_about(tmp_path: Path) -> None:
    path = write(tmp_path, "web:1x1:2x2\nshop: three \nfour\n\n  # no:token\n")
    book = read_book(path)
    assert book.tokens == {digest_of("1x1:2x2"): "web", digest_of("three"): "shop", digest_of("four"): "line 3"}
    [warning] = book.warnings
    assert "line 1" in warning and "1x1" not in warning and "2x2" not in warning


def test_several_lines_of_one_name_are_one_caller(tmp_path: Path) -> None:
    book = read_book(write(tmp_path, "web:old\nweb:new\n"))
    assert set(book.tokens.values()) == {"web"} == set(book.entries)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "holds no token"),
        ("# only this\n", "holds no token"),
        ("a:one\nb: \n", "line 2: a token is printable"),
        ("two words", "line 1: a token is printable"),
        ("x:clé", "line 1: a token is printable"),
        ("x:" + "y" * 4097, "line 1: a token is printable"),
        (":one", "line 1: no name"),
        ("a:one\nb:one", "line 2: the same token"),
        ("n" * 65 + ":words", "line 1: a name is at most 64"),
        ("a\x01b:words", "line 1: a name is at most 64 printable"),
        ('[callers.web]\ntoken="words"', "line 1: looks like TOML"),
        ('[defaults]\ntoken="words', "line 1: looks like TOML"),
    ],
)
def test_bad_lines_are_refused_without_quoting_them(tmp_path: Path, content: str, reason: str) -> None:
    if content.startswith("[callers"):
        content += "\n="  # no TOML
    message = refused(write(tmp_path, content))
    assert reason in message
    assert "words" not in message


WEB = '[callers.web]\ntoken = "words"\n'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "callers: is missing"),
        ("callers = 3", "callers: "),
        ("[callers]", "callers: "),
        ("[callers.web]", "callers.web: has neither a token nor a certificate"),
        ("[callers.web]\ntokens = []", "callers.web: has neither"),
        (WEB + "[other]", "other: unknown key"),
        (WEB + "tokns = 3", "callers.web.tokns: unknown key"),
        ('[callers.web]\ntoken = "two words"', "callers.web.token: a token is 1 to 4096 printable"),
        ('[callers.web]\ntokens = ["words", ""]', "callers.web.tokens.1: a token is"),
        ('[callers.web]\ntoken = ["words"]', "callers.web.token: "),
        ('[callers.web]\ntoken_sha256 = "words"', "callers.web.token_sha256: a SHA-256 digest is 64"),
        ('[callers."a b"]\ntoken = "words"', "a name is 1 to 64 letters"),
        (f'[callers.{"n" * 65}]\ntoken = "words"', "a name is 1 to 64 letters"),
        ('[callers."../x"]\ntoken = "words"', "a name is 1 to 64 letters"),
        (WEB + '[callers.shop]\ntoken = "words"', "callers.shop: the same token as before, of web"),
        (WEB + "requests_per_second = 0", "callers.web.requests_per_second: "),
        (WEB + "requests_per_second = nan", "callers.web.requests_per_second: "),
        (WEB + "requests_per_second = inf", "callers.web.requests_per_second: "),
        (WEB + "requests_per_second = true", "callers.web.requests_per_second: "),
        (WEB + "max_requests = 1.5", "callers.web.max_requests: "),
        (WEB + 'max_requests = "words"', "callers.web.max_requests: "),
        (WEB + f"max_requests = {10**30}", "callers.web.max_requests: "),
        (WEB + "max_slots = 0", "callers.web.max_slots: "),
        (WEB + "weight = 0", "callers.web.weight: "),
        (WEB + "max_priority = 11", "callers.web.max_priority: "),
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
    ],
)
def test_bad_toml_is_refused_by_its_key_without_quoting_it(tmp_path: Path, content: str, reason: str) -> None:
    message = refused(write(tmp_path, content, "callers.toml"))
    assert reason in message
    assert "words" not in message


def test_every_wrong_key_is_named(tmp_path: Path) -> None:
    message = refused(write(tmp_path, WEB + "max_slots = 0\nweight = -1\n", "callers.toml"))
    assert "callers.web.max_slots: " in message and "callers.web.weight: " in message


def test_defaults_are_every_callers_that_says_nothing_else(tmp_path: Path) -> None:
    text = (
        '[defaults]\nmax_slots = 4\nrequests_per_second = 2\n[callers.a]\ntoken="x"\nmax_slots = 8\n'
        '[callers.b]\ntoken="y"\nrequests_burst=9'
    )
    entries = read_book(write(tmp_path, text, "callers.toml")).entries
    assert (entries["a"].limits.max_slots, entries["a"].limits.requests_per_second) == (8, 2)
    assert (entries["b"].limits.max_slots, entries["b"].limits.requests_burst) == (4, 9)


def test_a_digest_stands_for_its_token(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"s3cret").hexdigest().upper()
    path = write(tmp_path, f'[callers.web]\ntoken_sha256 = "{digest}"\n', "callers.toml")
    assert whose(path, "s3cret") == "web"


def test_a_file_of_another_name_is_toml_if_it_has_a_table_of_callers(tmp_path: Path) -> None:
    """Secrets are often mounted under a name without a suffix."""
    assert whose(write(tmp_path, WEB), "words") == "web"


def test_what_is_toml_by_chance_is_lines(tmp_path: Path) -> None:
    assert whose(write(tmp_path, "callers=3\n"), "callers=3") == "line 1"


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "huge", "bytes"])
def test_what_is_no_readable_file_is_refused(tmp_path: Path, kind: str) -> None:
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
    refused(path)
