"""`dragoman translate`: answers to texts, to the lines of a stream, or to a file."""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from dragoman.client.calls import Scope
from dragoman.client.errors import InvalidArgument
from dragoman.client.lines import LineFile, Pause, in_order, json_line, line_progress, naming_refused, stream_lines
from dragoman.client.output_file import OutputFile
from dragoman.client.results import Result
from dragoman.client.search import AS_THE_MODEL_DOES, DENIABLE, FLAG_FIELDS, Search, denial, flag, refusal
from dragoman.client.sync import Client
from dragoman.model.errors import InputError

# One line in, one line out, whatever the model says.
_LINE_BREAKS = str.maketrans("\n\r", "  ")
_ARGUMENTS = ("model", "model_version", "source_language", "target_language", "max_new_tokens", "truncate", "search")


@dataclass(frozen=True, slots=True)
class TranslateOptions:
    """Options of the requests and of the output.

    Attributes:
        is_streamed: Print pieces as they come, one text after the other.
        is_json: Print a line of JSON for each text, with every field of `Result`; of a blank line all but the text and the tokens
            are null, and bytes of a token's piece that are not UTF-8 become U+FFFD.
        search: Search options. Of several answers each has a line; each text has as many lines, blank ones if need be.
        has_scores: Print each answer's score and a tab before it.
    """

    model: str = ""
    max_new_tokens: int | None = None
    truncate: bool = False
    concurrency: int = 32
    is_streamed: bool = False
    is_json: bool = False
    search: Search = AS_THE_MODEL_DOES
    has_scores: bool = False
    source_language: str = ""
    target_language: str = ""
    model_version: str = ""

    def __post_init__(self) -> None:
        if self.is_streamed and self.is_json:
            raise InputError("--stream prints pieces as they come, --json whole answers: give one of them")
        if self.is_streamed and (self.has_scores or self.num_answers > 1):
            raise InputError("--stream prints the pieces of one answer: it goes with neither --scores nor --num-return-sequences")
        if (self.search.return_log_probs or self.search.top_log_probs) and not self.is_json:
            raise InputError("--log-probs and --top-log-probs go with --json")
        if self.has_scores and self.is_json:
            raise InputError("--scores is for lines; --json has the scores without it")

    @property
    def num_answers(self) -> int:
        """Answers to each text that are printed."""
        return 1 if self.search.num_return_sequences is None else self.search.num_return_sequences

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the client's methods, beside the text."""
        return {name: getattr(self, name) for name in _ARGUMENTS}

    def by_flag(self) -> dict[str, Any]:
        """Return the options that answers depend on, by flag; a denied one by the flag that denies it."""
        values = {name: getattr(self.search, name) for name in FLAG_FIELDS}
        values |= {name: value for name, value in self.arguments.items() if name != "search"}
        denied = {denial(name): True for name in DENIABLE if values[name] is False}
        return (
            {flag(name): value for name, value in values.items()} | denied | {"--json": self.is_json, "--scores": self.has_scores}
        )


def translate_texts(client: Client, texts: Sequence[str], out: TextIO, options: TranslateOptions) -> None:
    """Write the answers to each text, a line each, in order; raises as `translate_lines`."""
    _write_answers(client, texts, lambda number: f"text {number}", out, options)


def translate_lines(client: Client, source: BinaryIO, out: TextIO, options: TranslateOptions) -> None:
    """Write a line for each line of standard input, in order and flushed; a blank one for a blank one, without asking the server.

    While lines are there to read, `concurrency` of them are in flight; when the next is not there yet, all before it are answered
    first. So a person, or a program at the other end of a pipe, gets each answer before the next line is due.

    Raises:
        InputError: If a line is not UTF-8 or the server refuses it, naming the line; those before it are answered.
        CallError: If a call fails for any other reason.
    """
    lines = stream_lines(source, "standard input")
    _write_answers(client, lines, lambda number: f"standard input, line {number}", out, options)


def translate_file(
    client: Client,
    in_path: Path,
    out_path: Path,
    options: TranslateOptions,
    progress: TextIO | None = None,
    is_resumed: bool = False,
) -> int:
    """Translate a file line by line into another, which appears when all of it is done; return the number of lines.

    Each line ends as its source line. An interrupted run leaves its output beside the file, as `OutputFile` says.

    Args:
        client: Client of the server.
        in_path: Lines of UTF-8; blank ones stay blank.
        out_path: File to write or replace; another than the one that is read.
        options: Options of the requests and of the output.
        progress: Stream for a progress bar, if it is a terminal.
        is_resumed: Continue an earlier run, if there was one.

    Raises:
        InputError: If a file cannot be read, written or resumed, both are the same, or a line is refused, naming it.
        CallError: If a call fails for any other reason.
    """
    lines = _read(in_path, options)
    if out_path.exists() and in_path.samefile(out_path):
        raise InputError(f"--out: {out_path} is the file that is translated, {in_path}")
    with (
        OutputFile(out_path, lines, options.by_flag(), is_resumed) as file,
        line_progress(progress, in_path.name, len(lines), file.num_done) as advance,
        closing(_file_answers(client, lines, file.num_done, options)) as answers,
    ):
        for line, answer in answers:
            file.write(line, answer)
            advance()
    return len(lines)


def print_file(client: Client, in_path: Path, out: TextIO, options: TranslateOptions) -> None:
    """Translate a file line by line onto a stream; raises as `translate_file`."""
    with closing(_file_answers(client, _read(in_path, options), 0, options)) as answers:
        for _, answer in answers:
            out.write(answer)
            out.flush()


def _write_answers(
    client: Client, lines: Iterable[str | Pause], name: Callable[[int], str], out: TextIO, options: TranslateOptions
) -> None:
    warned: set[str] = set()
    if options.is_streamed:
        texts = (line for line in lines if not isinstance(line, Pause))
        for number, text in enumerate(texts, start=1):
            _write_pieces(client, text, name(number), out, options, warned)
        return

    def work(line: str, scope: Scope) -> Result | None:
        return client.generate(line, **options.arguments, scope=scope) if line.strip() else None

    with closing(naming_refused(in_order(lines, work, client.scope(), options.concurrency), name)) as answers:
        for number, answer in enumerate(answers, start=1):
            _warn(answer, name(number), warned)
            out.write(_lines(answer, options))
            out.flush()


def _read(in_path: Path, options: TranslateOptions) -> LineFile:
    if options.is_streamed:
        raise InputError("--stream is for texts and standard input, not for files")
    return LineFile(in_path)


def _file_answers(
    client: Client, lines: LineFile, num_done: int, options: TranslateOptions
) -> Generator[tuple[str, str], None, None]:
    """Yield each line of a file that is not done, and its output, in order. All share one stream."""

    def name(number: int) -> str:
        return f"{lines.name}, line {number}"

    warned: set[str] = set()
    results = client.generate_many(islice(lines, num_done, None), concurrency=options.concurrency, **options.arguments)
    with closing(naming_refused(results, name, num_done + 1)) as answers:
        sources = islice(zip(lines, lines.endings(), strict=True), num_done, None)
        for number, (line, ending) in enumerate(sources, start=num_done + 1):
            answer = next(answers)
            _warn(answer, name(number), warned)
            yield line, _lines(answer if line.strip() else None, options).replace("\n", ending)


def _write_pieces(client: Client, text: str, name: str, out: TextIO, options: TranslateOptions, warned: set[str]) -> None:
    """Write one answer as it comes, and end its line even where it breaks off."""
    is_begun = not text.strip()
    try:
        if not is_begun:
            with client.stream(text, **options.arguments) as stream:
                for piece in stream:
                    is_begun = True
                    out.write(piece.text.translate(_LINE_BREAKS))
                    out.flush()
                    if piece.result is not None:
                        _warn(piece.result, name, warned)
    except InvalidArgument as error:
        raise refusal(name, error.message) from error
    finally:
        if is_begun:
            out.write("\n")
            out.flush()


def _warn(result: Result | None, name: str, warned: set[str]) -> None:
    """Print an answer's warnings on standard error, each once for all texts of a command."""
    for warning in set() if result is None else set(result.warnings) - warned:
        print(f"dragoman: {name}: {warning.removeprefix('text: ')}", file=sys.stderr)
        warned.add(warning)


def _lines(result: Result | None, options: TranslateOptions) -> str:
    """Return the output for a text, None for a blank one."""
    if options.is_json:
        return json_line(result, Result, text="", tokens=[])
    if result is None:
        return "\n" * options.num_answers
    if options.num_answers == 1 and not options.has_scores:
        return _line(result.text)
    lines = [
        (f"{answer.score:.6f}\t" if options.has_scores else "") + _line(answer.text)
        for answer in result.answers[: options.num_answers]
    ]
    return "".join(lines) + "\n" * (options.num_answers - len(lines))


def _line(text: str) -> str:
    return text.translate(_LINE_BREAKS) + "\n"
