"""Options of `dragoman load` and `dragoman load-compare`."""

import random
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO, cast

import msgspec
import typer

from dragoman.client.reach import Tls
from dragoman.client.settings import DEFAULT_TARGET
from dragoman.load.compare import CONFIDENCE, Comparison, Difference, compare
from dragoman.load.conditions import parse_conditions, parse_fields, parse_injections, parse_number, parse_shares, parse_slos
from dragoman.load.connection import make_target
from dragoman.load.plain_help import PlainCommand
from dragoman.load.plan import KINDS, Kind, Plan, Server, Work
from dragoman.load.result import Result, read_result
from dragoman.load.schedule import Arrivals, measure_trace
from dragoman.load.scrape import full_url
from dragoman.load.session import FAILED_CODE, Session, SessionOptions
from dragoman.load.show import NOTHING, milliseconds, number, signed_share
from dragoman.load.table import Table, open_console, print_table
from dragoman.load.texts import FileTexts, parse_lengths
from dragoman.model.errors import InputError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

WHEN, WHAT, SERVER, OUTPUT = "Schedule", "Requests", "Server", "Output"
# Beyond these the sender's memory is what is tested.
MOST_CALLERS = 100_000
MOST_REQUESTS = 100_000
_NOT_SHOWN = {"token", "output", "report"}
# Options that are called otherwise than what they set.
_FLAGS = {"texts": "--in", "source_language": "--from", "target_language": "--to"}


class ArrivalShape(StrEnum):
    """Distribution of arrivals."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"


@app.command(cls=PlainCommand, context_settings={"help_option_names": ["-h", "--help"]})
def load(
    context: typer.Context,
    server: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT[,...]", envvar="DRAGOMAN_SERVER", help="Servers, balanced call by call.", rich_help_panel=SERVER
        ),
    ] = DEFAULT_TARGET,
    token: Annotated[str | None, typer.Option(envvar="DRAGOMAN_TOKEN", help="Bearer token.", rich_help_panel=SERVER)] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of the server's certificate authority; turns TLS on.", rich_help_panel=SERVER)
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file of our certificate, where the server asks for one.", rich_help_panel=SERVER)
    ] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the private key of --certificate.", rich_help_panel=SERVER)] = None,
    server_name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name in the server's certificate, if not the one of --server.", rich_help_panel=SERVER),
    ] = "",
    metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="The server's metrics, read beside; may be repeated.", rich_help_panel=SERVER),
    ] = None,
    no_probe: Annotated[
        bool,
        typer.Option("--no-probe", help="Do not try a call of each kind before the run.", rich_help_panel=SERVER),
    ] = False,
    rate: Annotated[float | None, typer.Option(help="Calls a second, whatever is answered.", rich_help_panel=WHEN)] = None,
    arrivals: Annotated[ArrivalShape, typer.Option(help="For --rate: how they come.", rich_help_panel=WHEN)] = ArrivalShape.POISSON,
    burstiness: Annotated[float, typer.Option(help="For gamma: below 1 calls come in bursts.", rich_help_panel=WHEN)] = 1.0,
    ramp_to: Annotated[float | None, typer.Option(help="For --rate: the rate at the end.", rich_help_panel=WHEN)] = None,
    trace: Annotated[Path | None, typer.Option(help="File that says when calls are due.", rich_help_panel=WHEN)] = None,
    concurrency: Annotated[
        int, typer.Option(min=0, max=MOST_CALLERS, help="Callers that wait for their answers.", rich_help_panel=WHEN)
    ] = 0,
    duration: Annotated[
        float | None, typer.Option(help="Seconds; by default 30, for a trace its own.", rich_help_panel=WHEN)
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(help="Seconds of it that do not count; by default a tenth, at most 5.", rich_help_panel=WHEN),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Calls at the most.", rich_help_panel=WHEN)] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Search the highest rate that holds --slo, from --rate on.", rich_help_panel=WHEN)
    ] = False,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Sender processes.", rich_help_panel=WHEN)] = 1,
    seed: Annotated[int, typer.Option(help="Of arrivals, texts and everything drawn.", rich_help_panel=WHEN)] = 0,
    texts: Annotated[
        Path | None, typer.Option("--in", metavar="FILE", help="Sources, one a line, drawn at random.", rich_help_panel=WHAT)
    ] = None,
    words: Annotated[
        str,
        typer.Option(help="Without --in: words of a source: N, uniform:A:B, normal:M:D or lognormal:M:D.", rich_help_panel=WHAT),
    ] = "uniform:5:25",
    mix: Annotated[str, typer.Option(help="Shares of unary, stream and batch calls.", rich_help_panel=WHAT)] = "unary",
    batch_size: Annotated[int, typer.Option(min=1, max=MOST_REQUESTS, help="Requests of a batch call.", rich_help_panel=WHAT)] = 16,
    model: Annotated[str, typer.Option(help="Which of the server's models.", rich_help_panel=WHAT)] = "",
    source_language: Annotated[
        str, typer.Option("--from", metavar="LANGUAGE", help="Language of the sources.", rich_help_panel=WHAT)
    ] = "",
    target_language: Annotated[
        str, typer.Option("--to", metavar="LANGUAGE", help="Language of the answers.", rich_help_panel=WHAT)
    ] = "",
    num_beams: Annotated[str, typer.Option(help="Width of beam search, or shares: 1=0.8,4=0.2.", rich_help_panel=WHAT)] = "",
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Another field of every request, as docs/api.md has it; may be repeated.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for each call.", rich_help_panel=WHAT)] = 60.0,
    retries: Annotated[int, typer.Option(min=0, help="Further attempts, as the client makes them.", rich_help_panel=WHAT)] = 0,
    misbehave: Annotated[
        str,
        typer.Option(
            help="Shares of calls that misbehave, with times: cancel=0.1:20ms, deadline=5%:20ms, slow=0.1:50ms, malformed=0.01.",
            rich_help_panel=WHAT,
        ),
    ] = "",
    slo: Annotated[
        str, typer.Option(help="What makes an answer good, with units: e2e=500ms,ttft=100ms,itl=20ms.", rich_help_panel=OUTPUT)
    ] = "",
    slo_share: Annotated[str, typer.Option(help="For --sweep: requests that have to be good.", rich_help_panel=OUTPUT)] = "99%",
    fail_on: Annotated[
        str,
        typer.Option(help="Exit with 3 if one holds: errors>0,p95>500ms; times have units.", rich_help_panel=OUTPUT),
    ] = "",
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.", rich_help_panel=OUTPUT)] = None,
    report: Annotated[Path | None, typer.Option(help="Write the result as one HTML page.", rich_help_panel=OUTPUT)] = None,
) -> None:
    """Put load on running servers and measure what their callers see.

    Give one of --rate, --trace and --concurrency. Latency counts from when a call was due, so whoever falls behind
    hides nothing. docs/load-testing.md has examples and the format of the output.
    """
    tls = Tls(ca, certificate, key, server_name)
    target = make_target(server, is_secure=ca is not None)
    named = {"model": model, "source_language": source_language, "target_language": target_language}
    work = Work(
        texts=None if texts is None else str(texts.absolute()),
        words=parse_lengths(words),
        mix=_parse_mix(mix),
        batch_size=batch_size,
        beams=_parse_beams(num_beams),
        fields=parse_fields(field or ()) | {name: value for name, value in named.items() if value},
    )
    seconds = _duration(duration, trace)
    plan = Plan(
        server=Server(target.name, target.authority, tls.read(), server_name, token),
        work=work,
        seconds=seconds,
        warmup_seconds=_warmup(warmup, seconds, requests),
        arrivals=None if rate is None else Arrivals(rate, arrivals.value, burstiness, ramp_to),
        trace=None if trace is None else str(trace.absolute()),
        concurrency=concurrency,
        max_calls=requests,
        timeout_seconds=timeout,
        num_retries=retries,
        injections=parse_injections(misbehave),
        slos=parse_slos(slo),
        seed=seed,
        run_id=f"load-{random.SystemRandom().randrange(16**6):06x}",
        num_processes=processes,
    )
    options = SessionOptions(
        metrics=tuple(full_url(url) for url in metrics or ()),
        is_sweep=sweep,
        share=parse_number(slo_share, "--slo-share"),
        conditions=parse_conditions(fail_on),
        output=output,
        report=report,
        settings=_settings(context, server),
        is_probed=not no_probe,
    )
    _check(plan, options)
    raise typer.Exit(Session(plan, options).perform(sys.stdout))


def _parse_mix(text: str) -> dict[Kind, float]:
    shares = parse_shares(text, "--mix")
    for name in shares:
        if name not in KINDS:
            raise InputError(f"--mix: {name}: not one of {', '.join(KINDS)}")
    return cast(dict[Kind, float], shares)


def _parse_beams(text: str) -> dict[int, float]:
    if not text:
        return {}
    beams: dict[int, float] = {}
    for width, share in parse_shares(text, "--num-beams").items():
        if not width.isdecimal() or not 0 < int(width) < 2**32:
            raise InputError(f"--num-beams: {width}: not a width")
        beams[int(width)] = share
    return beams


def _duration(given: float | None, trace: Path | None) -> float:
    """Return how long calls are sent; for a trace a little longer than until its last, so that that one counts."""
    if trace is None:
        return 30.0 if given is None else given
    extent = measure_trace(trace)
    return max(1.0, extent.seconds * (1 + 1 / extent.num_calls)) if given is None else given


def _warmup(given: float | None, seconds: float, requests: int | None) -> float:
    if given is not None:
        return given
    return 0.0 if requests is not None else min(5.0, seconds / 10)


def _check(plan: Plan, options: SessionOptions) -> None:
    """Raise `InputError` for options that do not go together."""
    plan.check()
    if options.is_sweep and (plan.arrivals is None or plan.arrivals.ramp_to is not None):
        raise InputError("--sweep goes with --rate alone: it chooses the rates itself")
    if options.is_sweep and not plan.slos:
        raise InputError("--sweep needs --slo: the knee is where it stops to hold")
    if not 0 < options.share <= 1:
        raise InputError(f"--slo-share: {options.share:g} is not over 0 and at most 1")
    if plan.arrivals is None and any(name in options.settings for name in ("--arrivals", "--burstiness", "--ramp-to")):
        raise InputError("--arrivals, --burstiness and --ramp-to go with --rate")
    if plan.work.texts is not None:
        FileTexts(Path(plan.work.texts))


def _settings(context: typer.Context, server: str) -> dict[str, str]:
    """Return what was asked for, by flag, without what is secret or says only where the result goes."""
    given = {name: value for name, value in context.params.items() if name not in _NOT_SHOWN and _is_given(context, name)}
    texts = {name: " ".join(value) if isinstance(value, list | tuple) else str(value) for name, value in given.items()}
    return {"--server": server} | {_FLAGS.get(name, f"--{name.replace('_', '-')}"): text for name, text in texts.items()}


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


compare_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

INTERVALS = (
    "The interval is of the second figure less the first, by a block bootstrap over the seconds of each run; a difference is "
    "beyond noise if the interval leaves zero out. Noise from run to run is not in it: repeat runs to see that."
)
HEAD = ("", "first", "second", "change", f"{CONFIDENCE:.0%} interval of the difference", "")


@compare_app.command(cls=PlainCommand, context_settings={"help_option_names": ["-h", "--help"]})
def load_compare(
    first: Annotated[Path, typer.Argument(help="Result of the run to compare with.")],
    second: Annotated[Path, typer.Argument(help="Result of the run in question.")],
    output: Annotated[Path | None, typer.Option(help="Write the comparison as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the comparison as one HTML page.")] = None,
    fail_if_worse: Annotated[
        bool, typer.Option("--fail-if-worse", help="Exit with 3 if the second is worse beyond noise.")
    ] = False,
) -> None:
    """Compare two results of `dragoman load --output` and say which differences are beyond noise."""
    results = read_result(first), read_result(second)
    comparison = compare(*results)
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n")
    if report is not None:
        report.write_text(comparison_page(comparison, results, (str(first), str(second))), encoding="utf-8")
    print_comparison(comparison, sys.stdout)
    raise typer.Exit(FAILED_CODE if fail_if_worse and is_worse(comparison) else 0)


def is_worse(comparison: Comparison) -> bool:
    """Tell whether any figure of the second run is worse beyond noise."""
    return any(difference.is_beyond_noise and not difference.is_better for difference in comparison.differences)


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    """Print a comparison."""
    console = open_console(stream)
    print_table(console, differences_table(comparison, ""))
    for flag, one, other in comparison.unlike:
        console.print(f"{flag}: {one or NOTHING} in the first, {other or NOTHING} in the second", markup=False)
    for warning in comparison.warnings:
        console.print(f"warning: {warning}", markup=False)


def differences_table(comparison: Comparison, caption: str) -> Table:
    """Return the figures of both runs, times in milliseconds, others a second."""
    return Table(caption, HEAD, [cells(difference) for difference in comparison.differences])


def cells(difference: Difference) -> list[str]:
    """Return the cells of a row: times in milliseconds, everything else a second."""
    show = milliseconds if difference.is_time else number
    unit = " (ms)" if difference.is_time else ""
    change = difference.change
    signs = ["+" if end > 0 else "" for end in (difference.low, difference.high)]
    interval = f"{signs[0]}{show(difference.low)} to {signs[1]}{show(difference.high)}"
    return [
        difference.name + unit,
        show(difference.first),
        show(difference.second),
        NOTHING if change is None else signed_share(change),
        interval,
        verdict(difference),
    ]


def verdict(difference: Difference) -> str:
    """Say what the interval means."""
    if not difference.is_beyond_noise:
        return "within noise"
    return "better" if difference.is_better else "worse"


def comparison_page(comparison: Comparison, results: tuple[Result, Result], names: tuple[str, str]) -> str:
    """Return a comparison as one HTML page."""
    from dragoman.load.report import Section, render

    runs = [
        (name, result.created, f"{result.counted_seconds:.1f} s", f"{result.total.counts.num:,}", f"{result.total.num_failed:,}")
        for name, result in zip(names, results, strict=True)
    ]
    head = ("", "began", "counted", "requests", "failed")
    sections = [
        Section("Differences", [differences_table(comparison, "Times in milliseconds")], text=INTERVALS),
        Section("Runs", [Table("First and second", head, runs)]),
    ]
    if comparison.unlike:
        sections.append(Section("Settings that differ", [Table("By flag", ("", "first", "second"), comparison.unlike)]))
    return render("Two runs compared", sections, warnings=comparison.warnings)
