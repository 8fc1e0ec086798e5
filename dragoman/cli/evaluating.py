"""`dragoman evaluate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.connection import connect
from dragoman.cli.options import (
    SEARCH,
    SERVER,
    AuthorityOption,
    CertificateOption,
    FromOption,
    JsonOption,
    KeyOption,
    LengthPenaltyOption,
    ModelOption,
    ModelVersionOption,
    ServerNameOption,
    TokenOption,
    ToOption,
)
from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dragoman.client.search import Search
    from dragoman.client.sync import Client
    from dragoman.model.quality import Scores

app = typer.Typer()


@app.command()
def evaluate(
    source: Annotated[Path, typer.Option(help="Text to translate, one sentence a line.")],
    reference: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Translate with a checkpoint, in PyTorch.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Translate with a bundle, in this process.")] = None,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Translate with a running server.", rich_help_panel=SERVER)
    ] = None,
    model: ModelOption = "",
    model_version: ModelVersionOption = "",
    source_language: FromOption = "",
    target_language: ToOption = "",
    num_beams: Annotated[
        int | None,
        typer.Option(min=1, help="Width of beam search, 1 is greedy; by default the model's, or 1.", rich_help_panel=SEARCH),
    ] = None,
    length_penalty: LengthPenaltyOption = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Score without case.")] = False,
    as_json: JsonOption = False,
    token: TokenOption = None,
    ca: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
) -> None:
    """Translate a text and print BLEU and chrF with sacreBLEU's signatures.

    Give one of --checkpoint, --bundle and --server. Neither text may have a blank line.
    """
    from dragoman.model.corpus import read_parallel

    if sum(side is not None for side in (checkpoint, bundle, server)) != 1:
        raise InputError("give exactly one of --checkpoint, --bundle and --server")
    of_server = {
        "--model": model,
        "--model-version": model_version,
        "--ca": ca,
        "--certificate": certificate,
        "--key": key,
        "--server-name": server_name,
    }
    for flag, value in of_server.items():
        if value and server is None:
            raise InputError(f"{flag} goes with --server")
    languages = source_language, target_language
    if checkpoint is not None and any(languages):
        raise InputError(f"{'--from' if source_language else '--to'} goes with --server or --bundle")
    if length_penalty is not None and num_beams in ((1,) if server is not None else (None, 1)):
        raise InputError("--length-penalty goes with --num-beams above 1")
    sources, references = read_parallel(source, reference)
    if server is not None:
        from dragoman.client.search import Search

        with connect(server, 60.0, token, ca, certificate, key, server_name) as client:
            score = _load_score()
            search = Search(num_beams=num_beams, length_penalty=length_penalty)
            hypotheses = _translate_with_server(client, source, sources, (model, model_version), languages, search)
    elif checkpoint is not None:
        _check_checkpoint(checkpoint)
        score = _load_score()
        hypotheses = _translate_with_checkpoint(checkpoint, sources, num_beams or 1, length_penalty)
    else:
        assert bundle is not None
        _check_bundle(bundle)
        score = _load_score()
        hypotheses = _translate_with_bundle(bundle, sources, languages, num_beams, length_penalty)
    scores = score(hypotheses, references, lowercase)
    if as_json:
        typer.echo(json.dumps(scores.to_dict()))
    else:
        typer.echo(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}\nchrF {scores.chrf:.2f}  {scores.chrf_signature}")


def _load_score() -> "Callable[[list[str], list[str], bool], Scores]":
    """Load what scores: after everything that could be wrong in a moment, and before the work, for it may not be installed."""
    from dragoman.model.quality import score

    return score


def _translate_with_server(
    client: "Client", path: Path, sources: list[str], model: tuple[str, str], languages: tuple[str, str], search: "Search"
) -> list[str]:
    from dragoman.client.errors import InvalidArgument
    from dragoman.client.search import refusal

    (name, version), (source_language, target_language) = model, languages
    hypotheses: list[str] = []
    try:
        for result in client.generate_many(
            sources,
            model=name,
            model_version=version,
            source_language=source_language,
            target_language=target_language,
            search=search,
        ):
            hypotheses.append(result.text)
    except InvalidArgument as error:
        raise refusal(f"{path}, line {len(hypotheses) + 1}", error.message) from error
    return hypotheses


def _check_checkpoint(directory: Path) -> None:
    """Raise `InputError` for a checkpoint that cannot be read; PyTorch takes seconds to load."""
    from dragoman.model.checkpoint_folder import CheckpointFolder

    CheckpointFolder.load(directory)


def _check_bundle(directory: Path) -> None:
    """Raise `InputError` for a bundle that is not whole, without reading its weights."""
    from dragoman.export.bundle import Bundle

    Bundle.open(directory, is_checked=False)


def _translate_with_checkpoint(checkpoint: Path, sources: list[str], num_beams: int, length_penalty: float | None) -> list[str]:
    from dragoman.model.checkpoint import Checkpoint
    from dragoman.model.evaluate import translate as translate_with_checkpoint

    loaded = Checkpoint.load(checkpoint)
    penalty = 1.0 if length_penalty is None else length_penalty
    return translate_with_checkpoint(loaded.model, loaded.tokenizers, sources, num_beams, penalty)


def _translate_with_bundle(
    bundle: Path, sources: list[str], languages: tuple[str, str], num_beams: int | None, length_penalty: float | None
) -> list[str]:
    from dragoman.client.search import in_flags
    from dragoman.server.offline import OfflineTranslator
    from dragoman.server.service.requests import GenerateRequest
    from dragoman.server.telemetry.logs import configure_logging

    configure_logging("warning", "console")  # standard output is for the scores
    source_language, target_language = languages
    wanted = GenerateRequest(
        num_beams=num_beams, length_penalty=length_penalty, source_language=source_language, target_language=target_language
    )
    try:
        return OfflineTranslator(bundle).translate(sources, wanted=wanted)
    except InputError as error:
        raise InputError(in_flags(str(error))) from error
