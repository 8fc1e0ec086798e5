"""The front door: one command line for training, evaluation, export, serving and calling.

Each command imports its package when it is called, so that `dragoman serve` never loads PyTorch.
"""

import json
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from model.errors import InputError

if TYPE_CHECKING:
    from client.sync import Client

app = typer.Typer(
    name="dragoman",
    help="Train, export, serve and call encoder-decoder Transformers.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULT_SERVER = "127.0.0.1:8500"

ServerOption = Annotated[str, typer.Option(metavar="HOST:PORT", envvar="DRAGOMAN_SERVER", help="Address of the server.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BeamsOption = Annotated[int, typer.Option(min=1, help="Width of beam search; 1 is greedy.")]
LengthPenaltyOption = Annotated[float | None, typer.Option(help="Exponent of the length in a beam's score; by default 1.")]
TokenOption = Annotated[str | None, typer.Option(envvar="DRAGOMAN_TOKEN", help="Bearer token.")]
AuthorityOption = Annotated[Path | None, typer.Option(help="PEM file of the server's certificate authority; turns TLS on.")]


# For a command whose options are declared in its own package, read when it is called: `--help` goes there too.
_ELSEWHERE: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True},
}


class Device(StrEnum):
    """Where PyTorch computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(version("dragoman"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")] = False,
) -> None:
    """Train, export, serve and call encoder-decoder Transformers."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Training configuration, TOML.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the text files; by default the configuration's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Checkpoint to write or to resume; by default runs/NAME.")] = None,
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = Device.AUTO,
    initial_checkpoint: Annotated[Path | None, typer.Option(help="Go on from this one; by default the configuration's.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves the choice to PyTorch.")] = 0,
) -> None:
    """Train a model on parallel text; run it again to resume."""
    from dataclasses import replace

    import torch

    from model.train import Trainer
    from model.training_config import TrainingConfig

    parsed = TrainingConfig.load(config)
    if initial_checkpoint is not None:
        parsed = replace(parsed, initial_checkpoint=str(initial_checkpoint))
    if threads:
        torch.set_num_threads(threads)
    chosen = "cuda" if device is Device.CUDA or (device is Device.AUTO and torch.cuda.is_available()) else "cpu"
    if chosen == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no CUDA device")
    folder = output or Path("runs") / parsed.name
    Trainer(parsed, data or config.parent, folder, torch.device(chosen)).run()
    typer.echo(f"wrote {folder}")


@app.command()
def evaluate(
    source: Annotated[Path, typer.Option(help="Text to translate, one sentence a line.")],
    reference: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Translate with a checkpoint, in PyTorch.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Translate with a bundle, in this process.")] = None,
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Translate with a running server.")] = None,
    model: Annotated[str, typer.Option(help="Which of the server's models.")] = "",
    num_beams: BeamsOption = 1,
    length_penalty: LengthPenaltyOption = None,
    lowercase: Annotated[bool, typer.Option(help="Score without case.")] = False,
    as_json: JsonOption = False,
    token: TokenOption = None,
    ca: AuthorityOption = None,
) -> None:
    """Translate a text and print BLEU and chrF with sacreBLEU's signatures."""
    from model.corpus import read_parallel
    from model.quality import score

    if sum(side is not None for side in (checkpoint, bundle, server)) != 1:
        raise InputError("give exactly one of --checkpoint, --bundle and --server")
    if server is None and (model or ca is not None):
        raise InputError("--model and --ca go with --server")
    if length_penalty is not None and num_beams == 1:
        raise InputError("--length-penalty goes with --num-beams above 1")
    sources, references = read_parallel(source, reference)
    if checkpoint is not None:
        hypotheses = _translate_with_checkpoint(checkpoint, sources, num_beams, length_penalty)
    elif bundle is not None:
        hypotheses = _translate_with_bundle(bundle, sources, num_beams, length_penalty)
    else:
        from client.search import Search

        assert server is not None
        search = Search(num_beams=num_beams, length_penalty=length_penalty)
        with _client(server, 60.0, token, ca) as client:
            hypotheses = [result.text for result in client.generate_many(sources, model=model, search=search)]
    scores = score(hypotheses, references, lowercase)
    if as_json:
        typer.echo(json.dumps(scores.to_dict()))
    else:
        typer.echo(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}\nchrF {scores.chrf:.2f}  {scores.chrf_signature}")


def _translate_with_checkpoint(checkpoint: Path, sources: list[str], num_beams: int, length_penalty: float | None) -> list[str]:
    from model.checkpoint import Checkpoint
    from model.evaluate import translate as translate_with_checkpoint

    loaded = Checkpoint.load(checkpoint)
    penalty = 1.0 if length_penalty is None else length_penalty
    return translate_with_checkpoint(loaded.model, loaded.tokenizer, sources, num_beams, penalty)


def _translate_with_bundle(bundle: Path, sources: list[str], num_beams: int, length_penalty: float | None) -> list[str]:
    from server.engine.messages import SearchOptions
    from server.offline import OfflineTranslator
    from server.telemetry.logs import configure_logging

    configure_logging("warning", "console")  # standard output is for the scores
    search = SearchOptions(num_beams=num_beams, length_penalty=1.0 if length_penalty is None else length_penalty)
    return OfflineTranslator(bundle).translate(sources, search=search)


@app.command()
def average(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT", help="Stages or runs of one model.")],
    output: Annotated[Path, typer.Option(help="Checkpoint to write.")],
    half: Annotated[bool, typer.Option("--half", help="Round weights to half precision: half the size.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Write a checkpoint with the mean of the weights of several."""
    from model.average import average_checkpoints

    _refuse_to_replace(output, force)
    average_checkpoints(checkpoints).save(output, half)
    typer.echo(f"wrote {output}: the mean of {len(checkpoints)} checkpoints")


def _refuse_to_replace(checkpoint: Path, force: bool) -> None:
    from model.checkpoint import WEIGHTS_FILE

    if (checkpoint / WEIGHTS_FILE).exists() and not force:
        raise InputError(f"{checkpoint}: there is a checkpoint already; --force replaces it")


@app.command()
def add_tokens(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint to start with.")],
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT", help="The texts that its tokens were learnt from.")],
    output: Annotated[Path, typer.Option(help="Checkpoint to write.")],
    vocab_size: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens that it is to have.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Write a checkpoint whose vocabulary has more tokens, to be trained further."""
    from model.checkpoint import Checkpoint
    from model.corpus import read_lines
    from model.growth import with_more_tokens

    _refuse_to_replace(output, force)
    small = Checkpoint.load(checkpoint)
    tokenizer = small.tokenizer.extended([line for path in texts for line in read_lines(path)], vocab_size)
    with_more_tokens(small, tokenizer).save(output)
    typer.echo(f"wrote {output}: {tokenizer.vocab_size - small.tokenizer.vocab_size} more tokens")


@app.command()
def nearest(
    candidates: Annotated[list[Path], typer.Argument(metavar="CANDIDATES", help="Equally many lines for each reference.")],
    reference: Annotated[Path, typer.Option(help="One sentence a line.")],
    output: Annotated[Path, typer.Option(help="Text to write, gzipped where its name ends in .gz.")],
) -> None:
    """Write the candidate of each reference that is nearest to it, by sentence BLEU: text to train a model on."""
    from model.corpus import read_lines, write_lines
    from model.nearest import choose_nearest

    chosen = choose_nearest(read_lines(reference), {str(path): read_lines(path) for path in candidates})
    write_lines(output, chosen)
    typer.echo(f"wrote {output}: {len(chosen)} lines")


@app.command()
def augment(
    source: Annotated[Path, typer.Option(help="Text to make more of, one sentence a line.")],
    target: Annotated[Path, typer.Option(help="Its translation, line by line.")],
    source_language: Annotated[str, typer.Option(help="Language of the source, such as en.")],
    target_language: Annotated[str, typer.Option(help="Language of the target, such as de.")],
    output_source: Annotated[Path, typer.Option(help="Text to write, gzipped where its name ends in .gz.")],
    output_target: Annotated[Path, typer.Option(help="Its translation.")],
    copies: Annotated[int, typer.Option(min=0, help="How often each sentence with a noun phrase is changed.")] = 6,
    phrases: Annotated[int, typer.Option(min=0, help="Short phrases around each very rare word.")] = 12,
    seed: Annotated[int, typer.Option(help="Of what is drawn here; the aligner draws with its own.")] = 1,
    aligner: Annotated[str, typer.Option(help="The program eflomal-align: name or path.")] = "eflomal-align",
) -> None:
    """Write more parallel text for rare words: sentences with other sentences' phrases, and phrases by themselves."""
    from model.augment import Augmenter, determiners_of
    from model.corpus import read_parallel, write_lines
    from model.phrases import align

    if len({path.resolve() for path in (source, target, output_source, output_target)}) < 4:
        raise InputError("source, target, --output-source and --output-target must be four files")
    determiners = determiners_of(source_language), determiners_of(target_language)
    augmenter = Augmenter(align(*read_parallel(source, target), aligner), determiners, seed)
    sentences, short = augmenter.substituted(copies), augmenter.short(phrases)
    if not sentences and not short:
        raise InputError(f"nothing can be made of {source} and {target}: too little text, or no linked phrases in it")
    write_lines(output_source, [text for text, _ in (*sentences, *short)])
    write_lines(output_target, [text for _, text in (*sentences, *short)])
    typer.echo(f"wrote {output_source} and {output_target}: {len(sentences)} sentences, {len(short)} phrases")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Trained checkpoint.")],
    output: Annotated[Path, typer.Argument(help="Bundle to write.")],
    precision: Annotated[str, typer.Option(help="Number format of the weights.")] = "fp32",
    name: Annotated[str | None, typer.Option(help="Name of the served model; by default the checkpoint's.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="For int8: source text to calibrate with, one sentence a line; there is a default.")
    ] = None,
    quality_source: Annotated[
        Path | None,
        typer.Option(help="For all but fp32: text that must lose no more than 0.3 BLEU and 0.2 chrF, one sentence a line."),
    ] = None,
    quality_reference: Annotated[Path | None, typer.Option(help="Its translation, line by line.")] = None,
) -> None:
    """Export a checkpoint to an ONNX bundle, and check that it computes the same."""
    from export.exporter import export_checkpoint
    from export.quality import QualityTexts
    from model.corpus import read_lines, read_parallel

    texts = None
    if quality_source is not None and quality_reference is not None:
        texts = QualityTexts(*read_parallel(quality_source, quality_reference))
    elif quality_source is not None or quality_reference is not None:
        raise InputError("--quality-source and --quality-reference go together")
    lines = None if calibration is None else read_lines(calibration)
    manifest = export_checkpoint(checkpoint, output, precision, name, force, lines, texts).manifest
    parity, changed = manifest.parity, manifest.parity.quality
    typer.echo(
        f"wrote {output}: {manifest.name} version {manifest.version}, {manifest.precision}; log-probabilities within "
        f"{parity.max_log_prob_difference:.1e} of PyTorch, {parity.num_token_mismatches} of {parity.num_sentences} "
        "greedy answers differ"
    )
    if parity.device != "cpu":
        typer.echo(f"verified on: {parity.device}")
    if changed is not None:
        scores = "" if changed.bleu_change is None else f", BLEU {changed.bleu_change:+.2f}, chrF {changed.chrf_change:+.2f}"
        typer.echo(
            f"that was before quantisation, which keeps {changed.agreement:.1%} of the likeliest tokens and moves a token's "
            f"log-probability by {changed.mean_log_prob_difference:.3f} on the average{scores}"
        )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Every other setting of docs/operations.md is a flag too, for example --max-slots 128.",
)
def serve(
    context: typer.Context,
    models: Annotated[Path | None, typer.Option(help="Folder of bundles.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="HTTP port of metrics and probes; 0 takes a free one.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings, TOML; flags and environment go before it.")] = None,
) -> None:
    """Serve models over gRPC until SIGTERM or Ctrl-C, then drain."""
    from server.main import serve as run_server

    flags = {"models": models, "host": host, "port": port, "metrics_port": metrics_port} | _parse_flags(context.args)
    run_server(flags, config)


def _parse_flags(arguments: list[str]) -> dict[str, str]:
    """Read `--some-name value` and `--some-name=value` into setting names and texts."""
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            raise InputError(f"{argument}: not a flag")
        name, separator, value = argument[2:].partition("=")
        if not separator:
            following = next(rest, None)
            if following is None:
                raise InputError(f"{argument}: lacks a value")
            value = following
        flags[name.replace("-", "_")] = value
    return flags


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
    from client.search import Search
    from client.translate import TranslateOptions, translate_file, translate_lines, translate_texts

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
    with _client(server, timeout, token, ca) as client:
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
    from client.score_files import ScoreOptions, score_files

    options = ScoreOptions(model, length_penalty, alignment, alignment_layer, concurrency, as_json)
    with _client(server, timeout, token, ca) as client:
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
    from client.models_table import print_models

    end = time.monotonic() + wait
    with _client(server, 60.0, token, ca) as client:
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
    from client.health import HealthTls, is_serving

    serves = is_serving(server, service, timeout, HealthTls(ca, certificate, key, server_name))
    typer.echo("serving" if serves else "not serving")
    raise typer.Exit(0 if serves else 1)


@app.command(**_ELSEWHERE)
def load(context: typer.Context) -> None:
    """Put load on running servers and measure what their callers see."""
    from client.load.command import app as load_app

    raise typer.Exit(load_app(context.args, prog_name="dragoman load", standalone_mode=False))


@app.command(name="load-compare", **_ELSEWHERE)
def load_compare(context: typer.Context) -> None:
    """Compare two results of `load` and say which differences are beyond noise."""
    from client.load.compare_command import app as compare_app

    raise typer.Exit(compare_app(context.args, prog_name="dragoman load-compare", standalone_mode=False))


def _client(server: str, timeout: float, token: str | None, ca: Path | None) -> "Client":
    """Connect to a server, over TLS if its certificate authority is given."""
    import grpc

    from client.certificates import read_certificates
    from client.sync import Client

    credentials = None if ca is None else grpc.ssl_channel_credentials(read_certificates(ca))
    try:
        return Client(server, timeout_seconds=timeout, token=token, credentials=credentials)
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        flags = {"target": "--server", "timeout_seconds": "--timeout", "token": "--token"}
        raise InputError(f"{flags.get(field, field)}: {reason}") from error


def main() -> None:
    """Run the command line.

    What the user got wrong is a line on standard error and exit code 2, a call that failed one and exit code 1.
    """
    # ONNX Runtime would otherwise report on the models to its maker, and keep a database for that in the home folder.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines would stand among the log's, and ours say the same
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except InputError as error:
        _fail(str(error), 2)
    except typer.TyperException as error:  # the arguments are not the command's
        _fail(error.format_message(), 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        extra = _extra((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(f"this command needs {error.name}: pip install 'dragoman[{extra}]'", 2)
    except OSError as error:  # a file or standard output that cannot be used
        if error.errno is None:
            raise
        _discard_output()
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror), 2)
    except FloatingPointError as error:  # training that diverged
        _fail(str(error), 1)
    except Exception as error:
        if not _is_call_error(error):
            raise
        _fail(f"{error} ({getattr(error, 'code', '')})", 1)


def _extra(module: str) -> str | None:
    """Name the optional dependencies that a module comes with; None for a module that is not optional."""
    if sys.argv[1:2] == ["export"] and module in ("torch", "safetensors"):
        return "export"
    for extra, modules in {
        "train": ("torch", "safetensors", "matplotlib"),
        "evaluate": ("sacrebleu",),
        "export": ("onnx", "onnx_ir", "onnxscript"),
        "cpu": ("onnxruntime",),
    }.items():
        if module in modules:
            return extra
    return None


def _discard_output() -> None:
    """Keep Python from writing at its end what standard output did not take."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_call_error(error: Exception) -> bool:
    """Tell a failed call from a bug, without loading the client for commands that call nobody."""
    errors = sys.modules.get("client.errors")
    return errors is not None and isinstance(error, errors.CallError)


def _fail(message: str, code: int) -> NoReturn:
    print(f"dragoman: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
