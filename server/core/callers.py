"""Who may call: bearer tokens, read once, at the start; what is wrong with them stops it."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from dragoman.server.config import ConfigError


class Callers:
    """Knows callers by their tokens."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """Know these.

        Args:
            names: Names of callers by token; a name goes into the log.
        """
        self._callers = [(_digest(token), name) for token, name in names.items()]

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
        """Return the name of who shows a token; None for none that is known. It takes the same time whichever token it is.

        Args:
            metadata: What came beside the request: pairs of a key in lower case and a value.
        """
        values = [value for key, value in metadata or () if key == "authorization"]
        value = values[0] if len(values) == 1 else ""
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        digest = _digest(token)
        found: str | None = None
        for known, name in self._callers:
            if hmac.compare_digest(known, digest):
                found = name
        return found if scheme.lower() == "bearer" else None


def read_tokens(path: Path) -> dict[str, str]:
    """Read the file of tokens: one `name:token` or `token` a line; blank lines and lines that start with `#` do not count.

    Returns:
        Names by token; a token without a name is called after its line.

    Raises:
        ConfigError: Naming file and line, never the token.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"auth_tokens_file: {path} cannot be read: {reason}") from None
    callers: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, separator, token = content.rpartition(":")
        name, token = name.strip(), token.strip()
        if separator and not name:
            raise ConfigError(f"auth_tokens_file: {path}, line {number}: no name before the colon")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"auth_tokens_file: {path}, line {number}: a token is printable ASCII without spaces")
        if token in callers:
            raise ConfigError(f"auth_tokens_file: {path}, line {number}: the same token as before")
        callers[token] = name or f"line {number}"
    if not callers:
        raise ConfigError(f"auth_tokens_file: {path} holds no token")
    return callers


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
