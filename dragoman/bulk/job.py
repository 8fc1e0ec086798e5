"""A bulk job: input files cut into shards, each translated into an output file and a manifest, exactly once by content.

The manifest of a shard is written after its file and names its input, the bundle and the options, so that a job that was stopped
does what has no valid manifest, and a changed input, bundle or option is noticed. Files and manifests depend on nothing else:
neither on engines, nodes and interruptions nor on the time.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dragoman.bulk.formats import FORMATS, Cut, Rows, compressed, decompressed, kind_of
from dragoman.bulk.storage import Input, Output, open_output
from dragoman.bulk.translator import Outcome, Settings, Translator
from dragoman.export.bundle import Bundle
from dragoman.model.errors import InputError
from dragoman.server.service.glossaries import Glossaries
from dragoman.server.service.requests import with_defaults
from dragoman.server.stores.store import StoreError

# Errors of rows that a manifest lists.
MAX_LISTED_ERRORS = 20
MANIFEST_SUFFIX = ".shard.json"
State = Literal["done", "new", "changed input", "changed bundle", "changed options", "damaged output"]


class Shard(Struct, frozen=True, tag=True):
    """Rows of an input file: its number there, the bytes of the file read up to its end, and why it is to be done."""

    input: str
    number: int
    first_row: int
    cut: Cut
    num_bytes_read: int
    state: State = "new"

    @property
    def name(self) -> str:
        """Name of its output file."""
        kind, compression = kind_of(self.input)
        suffix = {"lines": "txt", "json": "jsonl"}.get(kind, kind)
        return f"{self.input}/part-{self.number:06d}.{suffix}{compression}"

    @property
    def digest(self) -> str:
        """SHA-256 of its content."""
        digest = hashlib.sha256(self.cut.head)
        digest.update(b"\0%d\0" % self.first_row)
        digest.update(self.cut.content)
        return digest.hexdigest()


class RowError(Struct, frozen=True):
    """A row that was not translated; rows of an input file count from 1."""

    row: int
    error: str


class Manifest(Struct, frozen=True):
    """Content, bundle and options that a shard's output was made of, and its counts; the first errors are listed."""

    input: str
    bundle: str
    options: str
    num_bytes: int
    num_rows: int
    num_errors: int
    source_tokens: int
    generated_tokens: int
    errors: list[RowError]


class Done(Struct, frozen=True, tag=True):
    """A shard that is done: by this run, or by an earlier one if `state` is `done`."""

    input: str
    number: int
    state: State
    manifest: Manifest
    num_bytes_read: int


class Failure(Struct, frozen=True, tag=True):
    """An error that ends the job; `is_input_error` if it is the user's to mend."""

    message: str
    is_input_error: bool

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure of an exception."""
        is_known = isinstance(error, InputError | StoreError)
        return cls(str(error) if is_known else f"{type(error).__name__}: {error}", is_known)

    def error(self) -> Exception:
        """Return the exception to raise."""
        return (InputError if self.is_input_error else RuntimeError)(self.message)


Event = Shard | Done | Failure


class Work(Struct, frozen=True):
    """Settings of a job that its workers need; `rows_per_shard` is the size of shards."""

    settings: Settings
    output: str
    glossary: str  # digest of the glossary's file; empty without one
    rows_per_shard: int

    @classmethod
    def of(cls, settings: Settings, output: str, rows_per_shard: int) -> "Work":
        """Return the work for a bundle; raise `InputError` if it cannot be read, or if answers would differ between two runs."""
        bundle = Bundle.open(Path(settings.bundle), is_checked=False)
        filled = with_defaults(settings.request, bundle.manifest.defaults, 2)
        if filled.do_sample and filled.temperature != 0 and filled.seed is None:
            raise InputError("seed: is missing; samples without one differ from run to run")
        return cls(replace(settings, digest=bundle.digest), output, glossary_digest(settings), rows_per_shard)

    @property
    def options(self) -> str:
        """SHA-256 of what outputs depend on, beside input and bundle."""
        relevant = self.settings.columns, self.settings.request, self.glossary
        return hashlib.sha256(msgspec.json.encode(relevant)).hexdigest()

    def shards(self, source: Input) -> Iterator[Shard]:
        """Yield the shards of an input file; raise `InputError`, naming it, if it cannot be read."""
        kind, compression = kind_of(source.name)
        first_row, columns = 1, self.settings.columns
        try:
            with source.open() as file, decompressed(file, compression) as stream:
                for number, cut in enumerate(FORMATS[kind].cut(stream, self.rows_per_shard, columns)):
                    position = file.tell() if cut.share is None else round(cut.share * source.num_bytes)
                    yield Shard(source.name, number, first_row, cut, position)
                    first_row += cut.num_rows
        except InputError as error:
            named = str(error) if str(error).startswith(source.address) else f"{source.address}: {error}"
            raise InputError(named) from None
        except (OSError, EOFError) as error:  # damaged compression
            raise InputError(f"{source.address}: {error}") from None

    def pending(self, source: Input, output: Output) -> Iterator[Shard | Done]:
        """Yield the shards of an input file that have to be done, and those that earlier runs have done; raises as `shards`."""
        for shard in self.shards(source):
            state, manifest = self._state(shard, output)
            if manifest is not None:
                yield Done(shard.input, shard.number, state, manifest, shard.num_bytes_read)
            else:
                yield replace(shard, state=state)

    def _state(self, shard: Shard, output: Output) -> tuple[State, Manifest | None]:
        content = output.read(shard.name + MANIFEST_SUFFIX)
        if content is None:
            return "new", None
        try:
            manifest = msgspec.json.decode(content, type=Manifest)
        except msgspec.MsgspecError:
            return "damaged output", None
        wanted: dict[State, tuple[str, str]] = {
            "changed bundle": (manifest.bundle, self.settings.digest),
            "changed options": (manifest.options, self.options),
            "changed input": (manifest.input, shard.digest),
        }
        for state, (found, own) in wanted.items():
            if found != own:
                return state, None
        return ("done", manifest) if output.size(shard.name) == manifest.num_bytes else ("damaged output", None)


def glossary_digest(settings: Settings) -> str:
    """Return the SHA-256 of the glossary's file; empty without one."""
    folder, name = settings.glossaries, settings.request.glossary
    return Glossaries(Path(folder)).digest(name) if folder and name else ""


class Worker:
    """Translates shards with an engine of its own and stores their outputs; rows of the next take slots as they become free."""

    def __init__(self, work: Work) -> None:
        """Load nothing yet."""
        self._work, self._translator = work, Translator.of(work.settings)
        self._output = open_output(work.output)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="shards")

    def submit(self, shard: Shard) -> Future[Done | Failure]:
        """Begin a shard and return its future end; thread-safe. Shards end in the order in which they begin."""
        try:
            rows = FORMATS[kind_of(shard.input)[0]].read(shard.cut, self._work.settings.columns)
            return self._writer.submit(self._finish, shard, rows, self._translator.submit(rows.texts))
        except Exception as error:
            failed: Future[Done | Failure] = Future()
            failed.set_result(Failure.of(error))
            return failed

    def _finish(self, shard: Shard, rows: Rows, future: Future[list[Outcome]]) -> Done | Failure:
        try:
            outcomes = future.result()
            content = compressed(rows.written(outcomes, self._work.settings.columns), kind_of(shard.input)[1])
            manifest = self._manifest(shard, outcomes, len(content))
            if glossary_digest(self._work.settings) != self._work.glossary:
                raise InputError(f"glossary {self._work.settings.request.glossary}: has changed; start the job again")
            if shard.state != "new":
                self._output.remove(shard.name + MANIFEST_SUFFIX)  # of another content
            self._output.write(shard.name, content)
            self._output.write(shard.name + MANIFEST_SUFFIX, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        except Exception as error:
            return Failure.of(error)
        return Done(shard.input, shard.number, shard.state, manifest, shard.num_bytes_read)

    def _manifest(self, shard: Shard, outcomes: Sequence[Outcome], num_bytes: int) -> Manifest:
        errors = [RowError(shard.first_row + place, one.error) for place, one in enumerate(outcomes) if one.error is not None]
        return Manifest(
            input=shard.digest,
            bundle=self._work.settings.digest,
            options=self._work.options,
            num_bytes=num_bytes,
            num_rows=len(outcomes),
            num_errors=len(errors),
            source_tokens=sum(one.source_tokens for one in outcomes),
            generated_tokens=sum(one.generated_tokens for one in outcomes),
            errors=errors[:MAX_LISTED_ERRORS],
        )
