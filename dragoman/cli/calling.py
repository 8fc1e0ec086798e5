"""Commands that call a server: `dragoman translate`, `score`, `health` and `attention`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.attention.maps import Kind
from dragoman.cli.options import (
    ConcurrencyOption,
    Connection,
    JsonOption,
    ModelOptions,
    TimeoutOption,
    in_groups,
    refuse_given,
    report,
    search_option,
)
from dragoman.client.search import Search
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dragoman.attention.maps import Look

app = typer.Typer()


@app.command()
@in_groups
def translate(
    model: ModelOptions,
    search: Search,
    connection: Connection,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; without any, lines of stdin.")] = None,
    in_: Annotated[Path | None, typer.Option("--in", metavar="FILE", help="Translate a file, line by line.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where its translation goes; - to print it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out where an earlier run broke off.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer at the most.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut sources that are too long.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it is decoded.")] = False,
    as_json: JsonOption = False,
    scores: Annotated[bool, typer.Option("--scores", help="Print each answer's score and a tab before it.")] = False,
    concurrency: ConcurrencyOption = 32,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Translate texts, lines or a file with a running server.

    Options that are not given have the model's defaults, which `dragoman models` lists.
    A blank line is answered by a blank line. When the translation of a file breaks off,
    the lines that are done stay beside --out, and --resume goes on from there.
    """
    from dragoman.client.translate import TranslateOptions, print_file, translate_file, translate_lines, translate_texts

    options = TranslateOptions(
        **asdict(model),
        max_new_tokens=max_new_tokens,
        truncate=truncate,
        concurrency=concurrency,
        is_streamed=stream,
        is_json=as_json,
        search=search,
        has_scores=scores,
    )
    if (in_ is None) != (out is None):
        raise InputError("--in and --out go together")
    if in_ is not None and texts:
        raise InputError("give texts or --in, not both")
    if resume and in_ is None:
        raise InputError("--resume goes with --in and --out")
    if resume and out == Path("-"):
        raise InputError("--resume goes on with a file: --out - prints")
    with connection.connect(timeout) as client:
        if in_ is not None and out == Path("-"):
            print_file(client, in_, sys.stdout, options)
        elif in_ is not None and out is not None:
            translate_file(client, in_, out, options, sys.stderr, resume)
        elif texts:
            translate_texts(client, texts, sys.stdout, options)
        else:
            translate_lines(client, sys.stdin.buffer, sys.stdout, options)


@app.command()
@in_groups
def score(
    model: ModelOptions,
    connection: Connection,
    source: Annotated[Path, typer.Option(metavar="FILE", help="Texts, one a line.")],
    target: Annotated[Path, typer.Option(metavar="FILE", help="Their translations, which are scored, line by line.")],
    alignment: Annotated[bool, typer.Option("--alignment", help="Print the links between words too.")] = False,
    alignment_layer: Annotated[int | None, typer.Option(min=0, help="Decoder layer they are taken from; by default all.")] = None,
    length_penalty: Annotated[float | None, search_option("length_penalty")] = None,
    as_json: JsonOption = False,
    concurrency: ConcurrencyOption = 32,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Score given translations with a running server.

    Prints for each pair of lines its score, a tab and its log-probability;
    with --alignment another tab and the links between words. A blank line
    beside a blank line has a blank line; a blank target beside a text is
    scored as an empty one.
    """
    from dragoman.client.score_files import Pairs, ScoreOptions, score_pairs

    options = ScoreOptions(
        **asdict(model),
        length_penalty=length_penalty,
        return_word_alignment=alignment,
        alignment_layer=alignment_layer,
        concurrency=concurrency,
        is_json=as_json,
    )
    pairs = Pairs(source, target)
    with connection.connect(timeout) as client:
        score_pairs(client, pairs, sys.stdout, options)


@app.command()
@in_groups
def health(
    connection: Connection,
    service: Annotated[str, typer.Option(metavar="NAME", help="liveness, readiness or a model; by default readiness.")] = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Ask a server once whether it serves: exit code 0 if it does, 1 if not.

    The reason is printed on standard error. For the probes of containers.
    """
    from dragoman.client.reach import why_not_serving

    with connection.client(timeout, is_retrying=False) as client:
        reason = why_not_serving(client, connection.server, service, connection.ca is not None)
    report(as_json, "not serving" if reason else "serving", is_serving=not reason, reason=reason)
    if reason:
        typer.echo(f"dragoman: {reason}", err=True)
        raise typer.Exit(1)


@app.command()
@in_groups
def attention(
    context: typer.Context,
    model: ModelOptions,
    connection: Connection,
    source: Annotated[str, typer.Argument(help="The source text.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="A page, .html, or a picture, .png.")],
    target: Annotated[str | None, typer.Argument(help="The target text; without it, the model's greedy answer.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Use a checkpoint, in PyTorch, in place of a server.")
    ] = None,
    kind: Annotated[list[Kind] | None, typer.Option(help="Show this kind alone; may be given again.")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Show this layer alone, from 0.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the greedy answer at the most.")] = None,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Draw the attention of a model between a source and a target.

    A checkpoint shows every head of every layer; a running server, which
    is asked where there is no --checkpoint, the attention from the target
    to the source, each layer's mean.
    """
    from dragoman.attention.maps import PAGE_ROOM, PICTURE_ROOM
    from dragoman.model.files import refuse_unwritable

    rooms = {".html": PAGE_ROOM, ".png": PICTURE_ROOM}
    if output.suffix not in rooms:
        raise InputError(f"--output {output}: a name that ends in .html or .png says what to write")
    room = rooms[output.suffix]
    refuse_unwritable(output)
    for label, text in (("source", source), ("target", target)):
        _refuse_broken(label, text)
    if target is not None and max_new_tokens is not None:
        raise InputError("--max-new-tokens goes without a target")
    write = _writer(output)  # which may not be installed
    kinds = kind or []
    look: Look
    if checkpoint is not None:
        of_servers = {*asdict(connection), "timeout", "model", "model_version"}
        refuse_given(context, of_servers, "goes with a server, not with --checkpoint")
        from dragoman.model.checkpoint_folder import CheckpointFolder

        CheckpointFolder.load(checkpoint)  # what can be wrong is said before PyTorch, which takes seconds to load

        from dragoman.attention.of_checkpoint import look_into

        languages = model.source_language, model.target_language
        look = look_into(
            checkpoint, source, target, room, kinds=kinds, layer=layer, max_new_tokens=max_new_tokens, languages=languages
        )
    else:
        from dragoman.attention.of_server import ask

        if untold := [wanted for wanted in kinds if wanted is not Kind.CROSS]:
            raise InputError(f"--kind {untold[0]}: a server tells of cross attention alone; --checkpoint shows the rest")
        with connection.connect(timeout) as client:
            look = ask(client, source, target, room, layer=layer, max_new_tokens=max_new_tokens, **asdict(model))
    write(look)
    typer.echo(f"wrote {output}: {look.num_maps} maps of model {look.model}")
    for note in look.notes:
        typer.echo(f"dragoman: {note}", err=True)


def _writer(output: Path) -> "Callable[[Look], None]":
    """Return what writes a page or a picture, for which matplotlib is needed; a file that is there is replaced by a whole one."""
    from dragoman.model.files import replaced, write_text

    if output.suffix == ".html":
        from dragoman.attention.page import page

        return lambda look: write_text(output, page(look))
    from dragoman.attention.picture import draw

    def write(look: "Look") -> None:
        with replaced(output) as temporary:
            draw(temporary, look)

    return write


def _refuse_broken(label: str, text: str | None) -> None:
    """Raise `InputError` for an argument that is not valid text, which Python accepts from a shell."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{label}: is not UTF-8") from error
