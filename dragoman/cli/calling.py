"""`dragoman translate`, `score`, `models` and `health`: what asks a running server."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.connection import connect
from dragoman.cli.options import DEFAULT_SERVER, AuthorityOption, JsonOption, LengthPenaltyOption, ServerOption, TokenOption
from dragoman.model.errors import InputError

app = typer.Typer()


@app.command()
def translate(
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts; without any, lines of stdin.")] = None,
    server: ServerOption = DEFAULT_SERVER,
    model: Annotated[str, typer.Option(help="Which of the server's models; may be left out where it has one.")] = "",
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it is decoded.")] = False,
    as_json: JsonOption = False,
    in_: Annotated[Path | None, typer.Option("--in", metavar="FILE", help="Translate a file, line by line.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where its translation goes.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer at the most.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut sources that are too long.")] = False,
    num_beams: Annotated[int | None, typer.Option(min=1, help="Width of beam search; by default 1, greedy.")] = None,
    num_return_sequences: Annotated[int | None, typer.Option(min=1, help="Answers to each text, a line each.")] = None,
    length_penalty: LengthPenaltyOption = None,
    early_stopping: Annotated[bool, typer.Option("--early-stopping", help="End as soon as as many are finished.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random.")] = False,
    temperature: Annotated[float | None, typer.Option(help="For --sample: flattens probabilities above 1.")] = None,
    top_k: Annotated[int, typer.Option(min=0, help="For --sample: draw from the k likeliest; 0 for all.")] = 0,
    top_p: Annotated[float | None, typer.Option(help="For --sample: draw from the likeliest that make up this.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="For --sample: draw the same again.")] = None,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens before an answer may end.")] = 0,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: tokens come again less easily.")] = None,
    no_repeat_ngram_size: Annotated[int, typer.Option(min=0, help="No so many tokens come twice; 0 for no such rule.")] = 0,
    forced_prefix: Annotated[str, typer.Option(metavar="TEXT", help="What answers start with.")] = "",
    alternatives: Annotated[bool, typer.Option("--alternatives", help="Answers part after the prefix, at once.")] = False,
    scores: Annotated[bool, typer.Option("--scores", help="Print each answer's score and a tab before it.")] = False,
    log_probs: Annotated[bool, typer.Option("--log-probs", help="Tell each token's log-probability; with --json.")] = False,
    top_log_probs: Annotated[int, typer.Option(min=0, help="Tell this many likeliest tokens too; with --json.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for each request, retries included.")] = 60.0,
    token: TokenOption = None,
    ca: AuthorityOption = None,
) -> None:
    """Translate texts, lines or a file with a running server."""
    from dragoman.client.search import Search
    from dragoman.client.translate import TranslateOptions, translate_file, translate_lines, translate_texts

    search = Search(
        num_beams=num_beams,
        num_return_sequences=num_return_sequences,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        do_sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        min_new_tokens=min_new_tokens,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        forced_prefix=forced_prefix,
        return_alternatives=alternatives,
        return_log_probs=log_probs,
        top_log_probs=top_log_probs,
    )
    options = TranslateOptions(model, max_new_tokens, truncate, concurrency, stream, as_json, search, scores)
    if (in_ is None) != (out is None):
        raise InputError("--in and --out go together")
    if in_ is not None and texts:
        raise InputError("give texts or --in, not both")
    with connect(server, timeout, token, ca) as client:
        if in_ is not None and out is not None:
            translate_file(client, in_, out, options, sys.stderr)
        elif texts:
            translate_texts(client, texts, sys.stdout, options)
        else:
            translate_lines(client, sys.stdin.buffer, sys.stdout, options)


@app.command()
def score(
    source: Annotated[Path, typer.Option(help="Texts, one a line.")],
    target: Annotated[Path, typer.Option(help="What each is scored with, line by line.")],
    server: ServerOption = DEFAULT_SERVER,
    model: Annotated[str, typer.Option(help="Which of the server's models; may be left out where it has one.")] = "",
    alignment: Annotated[bool, typer.Option("--alignment", help="Print the links between words too.")] = False,
    alignment_layer: Annotated[int | None, typer.Option(min=0, help="Decoder layer they are taken from; by default all.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Exponent of the length in a score.")] = None,
    as_json: JsonOption = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for each request, retries included.")] = 60.0,
    token: TokenOption = None,
    ca: AuthorityOption = None,
) -> None:
    """Score given translations with a running server: for each pair of lines its score and its log-probability."""
    from dragoman.client.score_files import ScoreOptions, score_files

    options = ScoreOptions(model, length_penalty, alignment, alignment_layer, concurrency, as_json)
    with connect(server, timeout, token, ca) as client:
        score_files(client, source, target, sys.stdout, options)


@app.command()
def models(
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the server to be ready.")] = 0.0,
    token: TokenOption = None,
    ca: AuthorityOption = None,
) -> None:
    """List a server's models."""
    from dragoman.client.models_table import print_models

    end = time.monotonic() + wait
    with connect(server, 60.0, token, ca) as client:
        while wait and not client.is_ready(timeout_seconds=5.0):
            if time.monotonic() > end:
                raise InputError(f"{server} was not ready within {wait:g} s")
            time.sleep(0.1)
        print_models(client.models(), sys.stdout, as_json)


@app.command()
def health(
    server: ServerOption = DEFAULT_SERVER,
    service: Annotated[str, typer.Option(metavar="NAME", help="liveness, readiness or a model; by default readiness.")] = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the answer.")] = 5.0,
    ca: AuthorityOption = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file of our certificate, where the server asks for one.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    server_name: Annotated[str, typer.Option(metavar="NAME", help="Name in the server's certificate, if another.")] = "",
) -> None:
    """Ask a server once whether it serves: exit code 0 if it does, 1 if not. For the probes of containers."""
    from dragoman.client.certificates import Tls
    from dragoman.client.health import is_serving

    serves = is_serving(server, service, timeout, Tls(ca, certificate, key, server_name))
    typer.echo("serving" if serves else "not serving")
    raise typer.Exit(0 if serves else 1)
