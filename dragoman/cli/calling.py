"""`dragoman score` and `health`: what asks a running server."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.connection import connect, open_client
from dragoman.cli.options import (
    DEFAULT_SERVER,
    AuthorityOption,
    CertificateOption,
    ConcurrencyOption,
    FromOption,
    JsonOption,
    KeyOption,
    ModelOption,
    ModelVersionOption,
    ServerNameOption,
    ServerOption,
    TimeoutOption,
    TokenOption,
    ToOption,
)

app = typer.Typer()


@app.command()
def score(
    source: Annotated[Path, typer.Option(metavar="FILE", help="Texts, one a line.")],
    target: Annotated[Path, typer.Option(metavar="FILE", help="Their translations, which are scored, line by line.")],
    model: ModelOption = "",
    model_version: ModelVersionOption = "",
    source_language: FromOption = "",
    target_language: ToOption = "",
    alignment: Annotated[bool, typer.Option("--alignment", help="Print the links between words too.")] = False,
    alignment_layer: Annotated[int | None, typer.Option(min=0, help="Decoder layer they are taken from; by default all.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Exponent of the length in a score.")] = None,
    as_json: JsonOption = False,
    server: ServerOption = DEFAULT_SERVER,
    concurrency: ConcurrencyOption = 32,
    timeout: TimeoutOption = 60.0,
    token: TokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Score given translations with a running server.

    Prints for each pair of lines its score, a tab and its log-probability;
    with --alignment another tab and the links between words. A blank line
    beside a blank line has a blank line; a blank target beside a text is
    scored as an empty one.
    """
    from dragoman.client.score_files import Pairs, ScoreOptions, score_pairs

    options = ScoreOptions(
        model, length_penalty, alignment, alignment_layer, concurrency, as_json, source_language, target_language, model_version
    )
    pairs = Pairs(source, target)
    with connect(server, timeout, token, ca, certificate, key, server_name) as client:
        score_pairs(client, pairs, sys.stdout, options)


@app.command()
def health(
    server: ServerOption = DEFAULT_SERVER,
    service: Annotated[str, typer.Option(metavar="NAME", help="liveness, readiness or a model; by default readiness.")] = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 5.0,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Ask a server once whether it serves: exit code 0 if it does, 1 if not.

    Why it does not is told on standard error. For the probes of containers.
    """
    from dragoman.client.reach import Tls, why_not_serving

    with open_client(server, timeout, None, Tls(ca, certificate, key, server_name), is_retrying=False) as client:
        reason = why_not_serving(client, server, service, ca is not None)
    typer.echo("not serving" if reason else "serving")
    if reason:
        typer.echo(f"dragoman: {reason}", err=True)
        raise typer.Exit(1)
