"""`dragoman perplexity`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.connection import connect
from dragoman.cli.options import (
    SERVER,
    AuthorityOption,
    CertificateOption,
    ConcurrencyOption,
    FromOption,
    JsonOption,
    KeyOption,
    ModelOption,
    ModelVersionOption,
    ServerNameOption,
    TokenOption,
    ToOption,
)
from dragoman.model.errors import InputError

app = typer.Typer()


@app.command()
def perplexity(
    target: Annotated[Path, typer.Option(metavar="FILE", help="The text, one sentence a line.")],
    source: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What it goes on with or translates, line by line; a language model needs none."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Ask a checkpoint, in PyTorch.")] = None,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Ask a running server.", rich_help_panel=SERVER)] = None,
    model: ModelOption = "",
    model_version: ModelVersionOption = "",
    source_language: FromOption = "",
    target_language: ToOption = "",
    as_json: JsonOption = False,
    concurrency: ConcurrencyOption = 32,
    token: TokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Tell how well a model predicts a text: perplexity and loss a token.

    Give one of --checkpoint and --server. No line of the text may be blank.
    """
    from dragoman.client.score_files import ScoreOptions, token_log_probs
    from dragoman.model.corpus import read_parallel, read_texts
    from dragoman.model.likelihood import Likelihood

    if (checkpoint is None) == (server is None):
        raise InputError("give exactly one of --checkpoint and --server")
    options = ScoreOptions(
        model=model,
        model_version=model_version,
        source_language=source_language,
        target_language=target_language,
        concurrency=concurrency,
    )
    of_server = {
        "--model": model,
        "--model-version": model_version,
        "--from": source_language,
        "--to": target_language,
        "--ca": ca,
        "--certificate": certificate,
        "--key": key,
        "--server-name": server_name,
    }
    for flag, value in of_server.items():
        if value and server is None:
            raise InputError(f"{flag} goes with --server")
    if source is None:
        targets = read_texts(target)
        sources = [""] * len(targets)
    else:
        sources, targets = read_parallel(source, target)
    if server is not None:
        with connect(server, 60.0, token, ca, certificate, key, server_name) as client:
            names = str(target) if source is None else f"{source} and {target}"
            found = Likelihood.of(token_log_probs(client, sources, targets, names, options))
    else:
        assert checkpoint is not None
        found = Likelihood.of(_by_checkpoint(checkpoint, sources, targets))
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))


def _by_checkpoint(directory: Path, sources: list[str], targets: list[str]) -> list[list[float]]:
    """Ask PyTorch, which takes seconds to load: what is wrong with the checkpoint is said before.

    Raises:
        InputError: If it cannot be read, or a line is too long for it.
    """
    from dragoman.model.checkpoint_folder import CheckpointFolder

    CheckpointFolder.load(directory)
    from dragoman.model.checkpoint import Checkpoint
    from dragoman.model.evaluate import target_log_probs

    loaded = Checkpoint.load(directory)
    return target_log_probs(loaded.model, loaded.tokenizers, sources, targets)
