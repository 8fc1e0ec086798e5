"""Credentials in files that an operator writes: what a bearer token may be, its digest, and keys that must not be encrypted."""

import hashlib
from typing import NoReturn

MAX_TOKEN_CHARACTERS = 4096


def is_token(text: str) -> bool:
    """Say whether a text can be a token: printable ASCII without spaces, at most `MAX_TOKEN_CHARACTERS`."""
    return 0 < len(text) <= MAX_TOKEN_CHARACTERS and text.isascii() and text.isprintable() and " " not in text


def digest_of(token: str) -> bytes:
    """Return the SHA-256 digest of a token; of whatever text a caller shows as one, too."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def no_password() -> NoReturn:
    """Refuse to ask for a key's password: nobody is there to type it.

    Raises:
        ValueError: Always.
    """
    raise ValueError("the key is encrypted")
