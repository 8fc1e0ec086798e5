"""Options of `dragoman load` and `dragoman load-compare`."""

import random
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from dragoman.client.reach import Tls
from dragoman.client.settings import DEFAULT_TARGET
from dragoman.load.compare import compare
from dragoman.load.conditions import (
    parse_beams,
    parse_conditions,
    parse_fields,
    parse_injections,
    parse_lengths,
    parse_mix,
    parse_number,
    parse_slos,
)
from dragoman.load.connection import make_server
from dragoman.load.items import read_texts
from dragoman.load.plain_help import PlainCommand
from dragoman.load.plan import Plan, Work
from dragoman.load.result import encode, read_result, write_file
from dragoman.load.schedule import Arrivals, measure_trace
from dragoman.load.scrape import full_url
from dragoman.load.session import FAILED_CODE, Session
from dragoman.load.table import print_comparison
from dragoman.model.errors import InputError

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# Beyond these the sender's memory is what is tested.
MOST_CALLERS = 100_000
MOST_REQUESTS = 100_000
_NOT_SHOWN = {"token", "output", "report"}


class ArrivalShape(StrEnum):
    """Distribution of arrivals."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"


def _option(panel: str, text: str, *flags: str, **keywords: Any) -> Any:
    """Return an option with its help, under a heading."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **keywords)


_server, _when, _what, _output = (partial(_option, panel) for panel in ("Server", "Schedule", "Requests", "Output"))


@app.command(cls=PlainCommand, context_settings=_HELP)
def load(
    context: typer.Context,
    server: Annotated[
        str, _server("Servers, balanced call by call.", metavar="HOST:PORT[,...]", envvar="DRAGOMAN_SERVER")
    ] = DEFAULT_TARGET,
    token: Annotated[str | None, _server("Bearer token.", envvar="DRAGOMAN_TOKEN")] = None,
    ca: Annotated[Path | None, _server("PEM file of the server's certificate authority; turns TLS on.")] = None,
    certificate: Annotated[Path | None, _server("PEM file of our certificate, where the server asks for one.")] = None,
    key: Annotated[Path | None, _server("PEM file of the private key of --certificate.")] = None,
    server_name: Annotated[str, _server("Name in the server's certificate, if not the one of --server.", metavar="NAME")] = "",
    metrics: Annotated[list[str] | None, _server("The server's metrics, read beside; may be repeated.", metavar="URL")] = None,
    no_probe: Annotated[bool, _server("Do not try a call of each kind before the run.", "--no-probe")] = False,
    rate: Annotated[float | None, _when("Calls a second, whatever is answered.")] = None,
    arrivals: Annotated[ArrivalShape, _when("For --rate: how they come.")] = ArrivalShape.POISSON,
    burstiness: Annotated[float, _when("For gamma: below 1 calls come in bursts.")] = 1.0,
    ramp_to: Annotated[float | None, _when("For --rate: the rate at the end.")] = None,
    trace: Annotated[Path | None, _when("File that says when calls are due.")] = None,
    concurrency: Annotated[int, _when("Callers that wait for their answers.", min=0, max=MOST_CALLERS)] = 0,
    duration: Annotated[float | None, _when("Seconds; by default 30, for a trace its own.")] = None,
    warmup: Annotated[float | None, _when("Seconds of it that do not count; by default a tenth, at most 5.")] = None,
    requests: Annotated[int | None, _when("Calls at the most.", min=1)] = None,
    sweep: Annotated[bool, _when("Search the highest rate that holds --slo, from --rate on.", "--sweep")] = False,
    processes: Annotated[int, _when("Sender processes.", min=1, max=256)] = 1,
    seed: Annotated[int, _when("Of arrivals, texts and everything drawn.")] = 0,
    texts: Annotated[Path | None, _what("Sources, one a line, drawn at random.", "--in", metavar="FILE")] = None,
    words: Annotated[str, _what("Without --in: words of a source: N, uniform:A:B, normal:M:D or lognormal:M:D.")] = "uniform:5:25",
    mix: Annotated[str, _what("Shares of unary, stream and batch calls.")] = "unary",
    batch_size: Annotated[int, _what("Requests of a batch call.", min=1, max=MOST_REQUESTS)] = 16,
    model: Annotated[str, _what("Which of the server's models.")] = "",
    source_language: Annotated[str, _what("Language of the sources.", "--from", metavar="LANGUAGE")] = "",
    target_language: Annotated[str, _what("Language of the answers.", "--to", metavar="LANGUAGE")] = "",
    num_beams: Annotated[str, _what("Width of beam search, or shares: 1=0.8,4=0.2.")] = "",
    field: Annotated[
        list[str] | None,
        _what("Another field of every request, as docs/api.md has it; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    timeout: Annotated[float, _what("Seconds for each call.", min=0.001)] = 60.0,
    retries: Annotated[int, _what("Further attempts, as the client makes them.", min=0)] = 0,
    misbehave: Annotated[
        str,
        _what("Shares of calls that misbehave, with times: cancel=0.1:20ms, deadline=5%:20ms, slow=0.1:50ms, malformed=0.01."),
    ] = "",
    slo: Annotated[str, _output("What makes an answer good, with units: e2e=500ms,ttft=100ms,itl=20ms.")] = "",
    slo_share: Annotated[str, _output("For --sweep: requests that have to be good.")] = "99%",
    fail_on: Annotated[str, _output("Exit with 3 if one holds: errors>0,p95>500ms; times have units.")] = "",
    output: Annotated[Path | None, _output("Write the result as JSON.")] = None,
    report: Annotated[Path | None, _output("Write the result as one HTML page.")] = None,
) -> None:
    """Put load on running servers and measure what their callers see.

    Give one of --rate, --trace and --concurrency. Latency counts from when a call was due, so whoever falls behind
    hides nothing. docs/load-testing.md has examples and the format of the output.
    """
    tls = Tls(ca, certificate, key, server_name)
    called = make_server(server, is_secure=ca is not None)
    named = {"model": model, "source_language": source_language, "target_language": target_language}
    work = Work(
        texts=None if texts is None else str(texts.absolute()),
        words=parse_lengths(words),
        mix=parse_mix(mix),
        batch_size=batch_size,
        beams=parse_beams(num_beams),
        fields=parse_fields(field or ()) | {name: value for name, value in named.items() if value},
    )
    seconds = 30.0
    if trace is not None:  # a little longer than until its last call, so that that one counts
        num_calls, last = measure_trace(trace)
        seconds = max(1.0, last * (1 + 1 / num_calls))
    seconds = seconds if duration is None else duration
    if warmup is None:
        warmup = 0.0 if requests is not None else min(5.0, seconds / 10)
    plan = Plan(
        server=msgspec.structs.replace(called, pem=tls.read(), server_name=server_name, token=token),
        work=work,
        seconds=seconds,
        warmup_seconds=warmup,
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
    session = Session(
        plan,
        metrics=tuple(full_url(url) for url in metrics or ()),
        is_sweep=sweep,
        share=parse_number(slo_share, "--slo-share"),
        conditions=parse_conditions(fail_on),
        output=output,
        report=report,
        settings=_settings(context, server),
        is_probed=not no_probe,
    )
    _check(session)
    raise typer.Exit(session.perform(sys.stdout))


def _check(session: Session) -> None:
    """Raise `InputError` for options that do not go together."""
    plan = session.plan
    plan.check()
    if session.is_sweep and (plan.arrivals is None or plan.arrivals.ramp_to is not None):
        raise InputError("--sweep goes with --rate alone: it chooses the rates itself")
    if session.is_sweep and not plan.slos:
        raise InputError("--sweep needs --slo: the knee is where it stops to hold")
    if not 0 < session.share <= 1:
        raise InputError(f"--slo-share: {session.share:g} is not over 0 and at most 1")
    if plan.arrivals is None and any(name in session.settings for name in ("--arrivals", "--burstiness", "--ramp-to")):
        raise InputError("--arrivals, --burstiness and --ramp-to go with --rate")
    if plan.work.texts is not None:
        read_texts(Path(plan.work.texts))


def _settings(context: typer.Context, server: str) -> dict[str, str]:
    """Return what was asked for, by flag, without what is secret or says only where the result goes."""
    settings = {"--server": server}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in _NOT_SHOWN and source is not None and source.name != "DEFAULT":
            value = context.params[name]
            settings[parameter.opts[0]] = " ".join(value) if isinstance(value, list | tuple) else str(value)
    return settings


compare_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@compare_app.command(cls=PlainCommand, context_settings=_HELP)
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
        write_file(output, encode(comparison))
    if report is not None:
        from dragoman.load.report import comparison_page

        write_file(report, comparison_page(comparison, results, (str(first), str(second))).encode())
    print_comparison(comparison, sys.stdout)
    is_worse = any(difference.verdict == "worse" for difference in comparison.differences)
    raise typer.Exit(FAILED_CODE if fail_if_worse and is_worse else 0)
