"""`dragoman translate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.connection import connect
from dragoman.cli.options import (
    DEFAULT_SERVER,
    SEARCH,
    AuthorityOption,
    CertificateOption,
    ConcurrencyOption,
    FromOption,
    JsonOption,
    KeyOption,
    LengthPenaltyOption,
    ModelOption,
    ModelVersionOption,
    ServerNameOption,
    ServerOption,
    TimeoutOption,
    TokenOption,
    ToOption,
)
from dragoman.model.errors import InputError

app = typer.Typer()


@app.command()
def translate(
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; without any, lines of stdin.")] = None,
    in_: Annotated[Path | None, typer.Option("--in", metavar="FILE", help="Translate a file, line by line.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where its translation goes; - to print it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out where an earlier run broke off.")] = False,
    model: ModelOption = "",
    model_version: ModelVersionOption = "",
    source_language: FromOption = "",
    target_language: ToOption = "",
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer at the most.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut sources that are too long.")] = False,
    special_tokens_in_text: Annotated[
        bool | None,
        typer.Option("--special-tokens-in-text/--no-special-tokens-in-text", help="Special tokens that a text names are tokens."),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it is decoded.")] = False,
    as_json: JsonOption = False,
    scores: Annotated[bool, typer.Option("--scores", help="Print each answer's score and a tab before it.")] = False,
    log_probs: Annotated[bool, typer.Option("--log-probs", help="Tell each token's log-probability; with --json.")] = False,
    top_log_probs: Annotated[int, typer.Option(min=0, help="Tell this many likeliest tokens too; with --json.")] = 0,
    num_beams: Annotated[
        int | None,
        typer.Option(min=1, help="Width of beam search, 1 is greedy; by default the model's, or 1.", rich_help_panel=SEARCH),
    ] = None,
    num_return_sequences: Annotated[
        int | None, typer.Option(min=1, help="Answers to each text, a line each.", rich_help_panel=SEARCH)
    ] = None,
    length_penalty: LengthPenaltyOption = None,
    early_stopping: Annotated[
        bool | None,
        typer.Option(
            "--early-stopping/--no-early-stopping",
            help="End as soon as --num-beams answers are finished.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    sample: Annotated[
        bool | None, typer.Option("--sample/--no-sample", help="Draw tokens at random.", rich_help_panel=SEARCH)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="For --sample: flattens probabilities above 1.", rich_help_panel=SEARCH)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="For --sample: draw from the k likeliest; 0 for all.", rich_help_panel=SEARCH)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="For --sample: draw from the likeliest that together are so probable.", rich_help_panel=SEARCH),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="For --sample: draw the same again.", rich_help_panel=SEARCH)] = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens before an answer may end.", rich_help_panel=SEARCH)
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens come again less easily.", rich_help_panel=SEARCH)
    ] = None,
    no_repeat_ngram_size: Annotated[
        int | None,
        typer.Option(min=0, help="No sequence of so many tokens comes twice; 0 for no such rule.", rich_help_panel=SEARCH),
    ] = None,
    forced_prefix: Annotated[str, typer.Option(metavar="TEXT", help="What answers start with.", rich_help_panel=SEARCH)] = "",
    alternatives: Annotated[
        bool,
        typer.Option("--alternatives", help="Answers that differ in the token after the prefix.", rich_help_panel=SEARCH),
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    concurrency: ConcurrencyOption = 32,
    timeout: TimeoutOption = 60.0,
    token: TokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Translate texts, lines or a file with a running server.

    What is not said is the model's to choose: `dragoman models` tells its
    languages and defaults. A blank line is answered by a blank line. When the translation of a file
    breaks off, what is done stays beside --out, and --resume goes on from there.
    """
    from dragoman.client.search import Search
    from dragoman.client.translate import TranslateOptions, print_file, translate_file, translate_lines, translate_texts

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
        special_tokens_in_text=special_tokens_in_text,
    )
    options = TranslateOptions(
        model,
        max_new_tokens,
        truncate,
        concurrency,
        stream,
        as_json,
        search,
        scores,
        source_language,
        target_language,
        model_version,
    )
    if (in_ is None) != (out is None):
        raise InputError("--in and --out go together")
    if in_ is not None and texts:
        raise InputError("give texts or --in, not both")
    if resume and in_ is None:
        raise InputError("--resume goes with --in and --out")
    if resume and out == Path("-"):
        raise InputError("--resume goes on with a file: --out - prints")
    with connect(server, timeout, token, ca, certificate, key, server_name) as client:
        if in_ is not None and out == Path("-"):
            print_file(client, in_, sys.stdout, options)
        elif in_ is not None and out is not None:
            translate_file(client, in_, out, options, sys.stderr, resume)
        elif texts:
            translate_texts(client, texts, sys.stdout, options)
        else:
            translate_lines(client, sys.stdin.buffer, sys.stdout, options)
