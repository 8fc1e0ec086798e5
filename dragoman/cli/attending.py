"""`dragoman attention`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dragoman.attention.maps import Kind
from dragoman.cli.connection import connect
from dragoman.cli.options import (
    DEFAULT_SERVER,
    AuthorityOption,
    CertificateOption,
    FromOption,
    KeyOption,
    ModelOption,
    ModelVersionOption,
    ServerNameOption,
    ServerOption,
    TimeoutOption,
    TokenOption,
    ToOption,
)
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dragoman.attention.maps import Look

app = typer.Typer()

# Parameters that mean nothing to a checkpoint.
_OF_SERVERS: Final = ("model", "model_version", "server", "timeout", "token", "ca", "certificate", "key", "server_name")


@app.command()
def attention(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="The text that is read.")],
    target: Annotated[str | None, typer.Argument(help="What is said of it; without it, the model's greedy answer.")] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="A page, .html, or a picture, .png.")] = ...,  # type: ignore[assignment]
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Look into a checkpoint, in PyTorch, in place of a server.")
    ] = None,
    kind: Annotated[list[Kind] | None, typer.Option(help="Show this kind alone; may be given again.")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Show this layer alone, from 0.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the greedy answer at the most.")] = None,
    model: ModelOption = "",
    model_version: ModelVersionOption = "",
    source_language: FromOption = "",
    target_language: ToOption = "",
    server: ServerOption = DEFAULT_SERVER,
    timeout: TimeoutOption = 60.0,
    token: TokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Draw what a model looks at while it reads a text and says another.

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
    languages = source_language, target_language
    look: Look
    if checkpoint is not None:
        for name in _OF_SERVERS:
            where = context.get_parameter_source(name)
            if where is not None and where.name == "COMMANDLINE":
                raise InputError(f"--{name.replace('_', '-')} goes with a server, not with --checkpoint")
        from dragoman.model.checkpoint_folder import CheckpointFolder

        CheckpointFolder.load(checkpoint)  # what can be wrong is said before PyTorch, which takes seconds to load

        from dragoman.attention.of_checkpoint import look_into

        look = look_into(
            checkpoint, source, target, room, kinds=kinds, layer=layer, max_new_tokens=max_new_tokens, languages=languages
        )
    else:
        from dragoman.attention.of_server import ask

        if untold := [wanted for wanted in kinds if wanted is not Kind.CROSS]:
            raise InputError(f"--kind {untold[0]}: a server tells of cross attention alone; --checkpoint shows the rest")
        with connect(server, timeout, token, ca, certificate, key, server_name) as client:
            look = ask(
                client,
                source,
                target,
                room,
                layer=layer,
                max_new_tokens=max_new_tokens,
                model=(model, model_version),
                languages=languages,
            )
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
    """Refuse an argument that is not text, which Python takes from a shell all the same."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{label}: is not UTF-8") from error
