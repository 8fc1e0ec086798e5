from pathlib import Path
from typing import Any

import pytest

from dragoman.server.config import ConfigError
from dragoman.server.core.callers import Callers, read_tokens


@pytest.mark.parametrize(
    ("metadata", "caller"),
    [
        ((("authorization", "Bearer s3cret"),), "web"),
        ((("authorization", "bearer s3cret"), ("other", "x")), "web"),
        ((("authorization", "Bearer s3cret"), ("authorization", "Bearer s3cret")), None),
        ((("authorization", b"Bearer s3cret"),), None),
        ((("authorization", "Bearer \ud800"),), None),
        ((("authorization", "Bearer "),), None),
        ((), None),
        (None, None),
    ],
)
def test_caller_is_who_shows_one_known_token(metadata: Any, caller: str | None) -> None:
    assert Callers({"s3cret": "web", "0ther": "shop"}).identify(metadata) == caller


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "holds no token"),
        ("# only this\n", "holds no token"),
        ("a:one\nb: \n", "line 2: a token is printable"),
        ("two words", "line 1: a token is printable"),
        ("x:clé", "line 1: a token is printable"),
        (":one", "line 1: no name"),
        ("a:one\nb:one", "line 2: the same token"),
    ],
)
def test_bad_tokens_file_is_refused_without_quoting_it(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_tokens(path)
    assert str(caught.value).startswith(f"auth_tokens_file: {path}")
    assert "words" not in str(caught.value)


def test_missing_tokens_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tokens(tmp_path / "none")
