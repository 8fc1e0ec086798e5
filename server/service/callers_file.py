"""Parser of the files of callers (`auth_tokens_file`) and operators; errors never quote a token.

Two formats: lines of `name:token` or `token`, without limits, or TOML with credentials and limits (docs/serve.md). A file is
TOML if its name ends in `.toml`, or if it parses as TOML with a table `callers`.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Self

import structlog
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from dragoman.model.files import read_bounded
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.listening import MAX_TOKEN_CHARACTERS, digest_of, is_token

log = structlog.get_logger("dragoman.callers")

SETTING = "auth_tokens_file"
MAX_FILE_BYTES = 16 * 2**20
MAX_NAME_CHARACTERS = 64
# Names appear in log lines and as metric labels.
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARACTERS - 1}}}")
# Line starts of TOML only; in the line format they would be read as tokens.
TABLE = re.compile(r"\[\[?\s*[\"']?(callers|defaults)\b")


def _check_token(token: str) -> str:
    if not is_token(token):
        raise ValueError(f"a token is 1 to {MAX_TOKEN_CHARACTERS} printable ASCII characters without spaces")
    return token


def _check_digest(digest: str) -> str:
    if re.fullmatch(r"[0-9a-fA-F]{64}", digest) is None:
        raise ValueError("a SHA-256 digest is 64 hexadecimal digits")
    return digest.lower()


Token = Annotated[str, AfterValidator(_check_token)]
Digest = Annotated[str, AfterValidator(_check_digest)]
Certificate = Annotated[str, Field(min_length=1, max_length=512)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Rate = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Limits(BaseModel):
    """Limits of a caller; None for the server's settings alone. docs/serve.md describes the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    models: list[Annotated[str, Field(min_length=1, max_length=128)]] | None = None
    requests_per_second: Rate | None = None
    requests_burst: Count | None = None
    tokens_per_second: Rate | None = None
    tokens_burst: Count | None = None
    max_requests: Count | None = None
    max_slots: Count | None = None
    max_waiting: Count | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)] | None = None
    max_priority: Annotated[int, Field(ge=-10, le=10)] | None = None
    default_deadline_seconds: Seconds | None = None
    max_deadline_seconds: Seconds | None = None

    def within(self, defaults: "Limits") -> "Limits":
        """Return these limits with defaults for None; raise `ValueError` if a burst has no rate."""
        names = Limits.model_fields
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for rate, burst in (("requests_per_second", "requests_burst"), ("tokens_per_second", "tokens_burst")):
            if burst in given and rate not in given and getattr(defaults, rate) is None:
                raise ValueError(f"{burst} is set without {rate}")
        return Limits.model_construct(**{name: given.get(name, getattr(defaults, name)) for name in names})


NO_LIMITS = Limits()


class _Entry(Limits):
    """A caller's table."""

    token: Token | None = None
    tokens: list[Token] = []
    token_sha256: Digest | None = None
    tokens_sha256: list[Digest] = []
    certificates: list[Certificate] = []
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not any(True for _ in self.digests()) and not self.certificates:
            raise ValueError("has neither a token nor a certificate")
        return self

    def digests(self) -> Iterator[bytes]:
        """Yield the SHA-256 digests of the tokens."""
        yield from (digest_of(token) for token in (self.token, *self.tokens) if token is not None)
        yield from (bytes.fromhex(digest) for digest in (self.token_sha256, *self.tokens_sha256) if digest is not None)


class _File(BaseModel):
    """The whole TOML file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    defaults: Limits = NO_LIMITS
    callers: dict[str, _Entry] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Entry:
    """A caller in the file; `expires` is None for never."""

    name: str
    limits: Limits = NO_LIMITS
    expires: datetime | None = None


@dataclass(frozen=True, slots=True)
class Book:
    """Parsed file of callers: names by the SHA-256 digest of a token, and by a name in a client certificate."""

    entries: Mapping[str, Entry]
    tokens: Mapping[bytes, str]
    certificates: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def read_callers_book(config: ServerConfig) -> Book | None:
    """Return the file of callers; None if unset, which means no authentication. Raises as `read_book`."""
    return _read_named(config, config.auth_tokens_file, SETTING, "file of callers")


def read_operators_book(config: ServerConfig) -> Book | None:
    """Return the file of operators; None if unset, which means no authentication of the admin service. Raises as `read_book`."""
    return _read_named(config, config.admin_tokens_file, "admin_tokens_file", "file of operators")


def _read_named(config: ServerConfig, path: Path | None, setting: str, title: str) -> Book | None:
    if path is None:
        return None
    book = read_book(path, has_client_certificates=config.tls_client_ca is not None, setting=setting)
    for warning in book.warnings:
        log.warning(title, warning=warning)
    return book


def read_book(path: Path, *, has_client_certificates: bool = False, setting: str = SETTING) -> Book:
    """Read a file of callers; `has_client_certificates` is whether connections request them (`tls_client_ca`).

    Raises:
        ConfigError: Naming the file and each wrong key or line, never a token.
    """
    file = f"{setting}: {path}"
    text = _read(path, file)
    try:
        tables: dict[str, Any] | None = tomllib.loads(text)
    except ValueError as error:  # includes TOMLDecodeError and impossible numbers or dates
        if path.suffix == ".toml":
            raise ConfigError(f"{file}: not a TOML file: {error}") from None
        tables = None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply") from None
    if tables is not None and (path.suffix == ".toml" or isinstance(tables.get("callers"), dict)):
        book = _read_tables(file, tables)
    else:
        book = _read_lines(file, text)
    if book.certificates and not has_client_certificates:
        name = next(iter(book.certificates.values()))
        raise ConfigError(f"{file}: callers.{name}.certificates is set, and tls_client_ca is not")
    return book


def _read(path: Path, file: str) -> str:
    try:
        return read_bounded(path, MAX_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{file} cannot be read: {reason}") from None


def _read_tables(file: str, tables: dict[str, Any]) -> Book:
    try:
        content = _File.model_validate(tables)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise ConfigError("\n".join(f"{file}: {_explain(detail)}" for detail in details)) from None
    credentials = _Credentials(file)
    entries: dict[str, Entry] = {}
    for name, entry in content.callers.items():
        where = f"callers.{name}"
        if NAME.fullmatch(name) is None:
            allowed = f"1 to {MAX_NAME_CHARACTERS} letters, digits, dots, hyphens and underscores, a letter or a digit first"
            raise ConfigError(f"{file}: callers.{name[:MAX_NAME_CHARACTERS]!r}: a name is {allowed}")
        try:
            entries[name] = Entry(name, entry.within(content.defaults), entry.expires)
        except ValueError as error:
            raise ConfigError(f"{file}: {where}: {error}") from None
        credentials.add(where, name, entry.digests(), entry.certificates)
    return Book(entries, credentials.tokens, credentials.certificates)


def _read_lines(file: str, text: str) -> Book:
    """Read `name:token` or `token` lines; the name ends at the first colon, and a token without one is named after its line."""
    credentials = _Credentials(file)
    entries: dict[str, Entry] = {}
    warnings: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        where = f"line {number}"
        if TABLE.match(content) is not None:
            raise ConfigError(f"{file}, {where}: looks like TOML, which the file is not; let its name end in .toml")
        before, separator, after = content.partition(":")
        name, token = (before.strip(), after.strip()) if separator else ("", content)
        if separator and not name:
            raise ConfigError(f"{file}, {where}: no name before the colon")
        if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            allowed = f"a name is at most {MAX_NAME_CHARACTERS} printable characters"
            raise ConfigError(f"{file}, {where}: {allowed}, and ends at the first colon")
        if not is_token(token):
            raise ConfigError(f"{file}, {where}: a token is printable ASCII without spaces")
        if ":" in token:
            warnings.append(f"{file}, {where}: of several colons the first one ends the name; the token is all that follows it")
        credentials.add(where, name or where, [digest_of(token)], ())
        entries.setdefault(name or where, Entry(name or where))
    if not entries:
        raise ConfigError(f"{file} holds no token")
    return Book(entries, credentials.tokens, credentials.certificates, tuple(warnings))


class _Credentials:
    """Callers' names by credential; rejects duplicate credentials."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.tokens: dict[bytes, str] = {}
        self.certificates: dict[str, str] = {}

    def add(self, where: str, name: str, digests: Iterable[bytes], certificates: Iterable[str]) -> None:
        for digest in digests:
            if digest in self.tokens:
                raise ConfigError(f"{self._file}, {where}: the same token as before, of {self.tokens[digest]}")
            self.tokens[digest] = name
        for certificate in certificates:
            if certificate in self.certificates:
                both = f"the same certificate as before, of {self.certificates[certificate]}"
                raise ConfigError(f"{self._file}, {where}: {both}: {certificate!r}")
            self.certificates[certificate] = name


def _explain(detail: ErrorDetails) -> str:
    """Return one line about a wrong key, without its value, which may be a token."""
    key = ".".join(str(part) for part in detail["loc"]) or "file"
    match detail["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key"
        case "missing":
            return f"{key}: is missing"
        case "value_error":
            return f"{key}: {detail['ctx']['error']}"
        case "timezone_aware":
            return f"{key}: needs an offset, as in 2030-01-31T00:00:00Z"
        case _:
            return f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
