"""Commands that need no server: `dragoman bulk`."""

import sys
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman.cli.options import CallFailed, JsonOption, in_groups, report, tidy_when_terminated
from dragoman.client.search import Search, in_flags
from dragoman.model.errors import InputError

app = typer.Typer()
COLUMNS, ENGINES = "Columns", "Engines"


def _column(help_: str) -> Any:
    return typer.Option(help=help_, metavar="NAME", rich_help_panel=COLUMNS)


def _engine(help_: str, **settings: Any) -> Any:
    return typer.Option(help=help_, rich_help_panel=ENGINES, **settings)


@dataclass(frozen=True)
class ColumnOptions:
    """Names of columns."""

    column: Annotated[str, _column("Texts to translate; of text files, the lines.")] = "text"
    translation_column: Annotated[str, _column("Translations.")] = "translation"
    error_column: Annotated[str, _column("Why a row has no translation.")] = "error"
    score_column: Annotated[str, _column("Scores; by default none.")] = ""
    alternatives_column: Annotated[str, _column("All answers, with --num-return-sequences; by default none.")] = ""
    seconds_column: Annotated[str, _column("Time of each row; by default none. It differs from run to run.")] = ""


@dataclass(frozen=True)
class EngineOptions:
    """Engines of this machine or of a cluster."""

    max_slots: Annotated[int, _engine("Rows of an engine's decode batch; by default 64 to 256, as memory has room.", min=0)] = 0
    engines: Annotated[int, _engine("Engines, a process each; by default as many as are fastest.", min=0)] = 0
    num_threads: Annotated[int, _engine("Threads of each; by default its part of the cores.", min=0)] = 0
    device: Annotated[str, _engine("auto, cpu, cuda or cuda:N.")] = "auto"
    ray: Annotated[
        str, _engine("Run on a Ray cluster: its address, or auto for the one of this machine or of RAY_ADDRESS.", metavar="ADDRESS")
    ] = ""
    max_engines: Annotated[int, _engine("With --ray: most engines; by default as many as there is room for.", min=0)] = 0
    num_cpus: Annotated[float, _engine("With --ray: CPUs reserved for each engine; by default its threads.", min=0)] = 0.0
    num_gpus: Annotated[float, _engine("With --ray: GPUs of each; by default 1 if the bundle needs one.", min=0)] = 0.0


@app.command()
@in_groups
def bulk(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, folders, globs; s3://, gs://, az:// too.")],
    output: Annotated[str, typer.Option(metavar="FOLDER", help="Where outputs go; what is there and still right is kept.")],
    model: Annotated[Path, typer.Option(metavar="BUNDLE", help="The bundle.")],
    search: Search,
    columns: ColumnOptions,
    engine: EngineOptions,
    source_language: Annotated[str, typer.Option("--from", metavar="LANGUAGE", help="Language of the texts.")] = "",
    target_language: Annotated[str, typer.Option("--to", metavar="LANGUAGE", help="Language of the translations.")] = "",
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer at the most.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut sources that are too long.")] = False,
    glossaries: Annotated[str, typer.Option(metavar="FOLDER", help="Glossaries that --glossary names.")] = "",
    rows_per_shard: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rows of an output file; what a kill loses.")] = 2000,
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Price of all machines an hour, for the cost.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Translate files with engines of this machine, or of a Ray cluster.

    Reads text, JSON lines, CSV and Parquet, text ones compressed with gzip or zstd too.
    A job that was stopped goes on where it stopped when it is started again.
    """
    from dragoman.bulk.formats import is_known
    from dragoman.bulk.job import Work
    from dragoman.bulk.local import local_engines, run_locally
    from dragoman.bulk.running import run_job
    from dragoman.bulk.storage import find_inputs, open_output
    from dragoman.bulk.translator import Columns, Translator
    from dragoman.server.stores.store import StoreError
    from dragoman.server.telemetry.logs import configure_logging

    configure_logging("warning", "console")  # standard output is for the summary
    if not engine.ray and (engine.max_engines or engine.num_cpus or engine.num_gpus):
        raise InputError("--max-engines, --num-cpus and --num-gpus go with --ray")
    names = Columns(
        columns.column,
        columns.translation_column,
        columns.error_column,
        columns.score_column,
        columns.alternatives_column,
        columns.seconds_column,
    )
    chosen: dict[str, Any] = {
        each.name: value for each in fields(search) if (value := getattr(search, each.name)) not in (each.default, [])
    }
    translator = Translator(
        model.absolute(),
        columns=names,
        max_slots=engine.max_slots,
        num_threads=engine.num_threads,
        device=engine.device,
        glossaries=glossaries,
        max_new_tokens=max_new_tokens,
        truncate=truncate,
        source_language=source_language,
        target_language=target_language,
        **chosen,
    )
    try:
        sources = find_inputs(inputs, is_known, output)
        work = Work.of(translator.settings, output, rows_per_shard)
        folder = open_output(output)
        if engine.ray:
            from dragoman.bulk.on_ray import RaySettings, run_on_ray

            sizes = max(1, engine.engines), engine.max_engines, engine.num_cpus, engine.num_gpus
            done = run_on_ray(work, sources, RaySettings(engine.ray, *sizes))
        else:
            work, num_engines = local_engines(work, engine.engines)
            pending = (each for source in sources for each in work.pending(source, folder))
            done = run_locally(work, pending, num_engines)
        with tidy_when_terminated(), folder.locked(), closing(done):
            summary = run_job(work, sources, folder, done, price_per_hour, sys.stderr)
    except InputError as error:
        raise InputError(in_flags(str(error))) from error
    except (StoreError, RuntimeError) as error:
        raise CallFailed(str(error)) from error
    report(as_json, summary.text(), **asdict(summary))
