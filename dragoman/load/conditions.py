"""Values of options: service levels, conditions that make a run fail, shares, lengths, fields of requests."""

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from operator import eq, ge, gt, le, lt, ne

import msgspec

from dragoman.load.plan import KINDS, MOST_WORDS, Fields, Injections, Kind, Lengths
from dragoman.load.result import Check, Result, Unit
from dragoman.load.tally import MEASURES
from dragoman.model.errors import InputError
from dragoman.v1.generation_pb2 import GenerateRequest

SLO_MEASURES = ("e2e", "ttft", "itl")
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "%": 1e-2}
_TIMES = ("s", "ms", "us")
_NUMBER = re.compile(r"(\d+\.?\d*(?:e-?\d+)?|\.\d+)\s*(%|ms|us|s|)")
_CONDITION = re.compile(r"\s*([\w.]+)\s*(>=|<=|==|!=|>|<)\s*(\S+?)\s*")
_COMPARE = {">": gt, ">=": ge, "<": lt, "<=": le, "==": eq, "!=": ne}
# Fields of a request that are not for `--field`.
_OF_FLAGS = ("text", "request_id", "model", "num_beams", "source_language", "target_language")
_PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max", "mean")


def share_good(result: Result) -> float | None:
    """Return the part of the requests that were answered within the service levels; those that misbehave do not count."""
    groups = [group.counts for name, group in result.groups.items() if name in KINDS]
    num = sum(group.num for group in groups)
    return sum(group.num_good for group in groups) / num if num else None


def _time(measure: str, figure: str, result: Result) -> float | None:
    summary = result.total.times.get(measure)
    return None if summary is None else (summary.percentiles | {"mean": summary.mean})[figure]


# Figures by name: unit, and value of a result. Times are those of a measure, as in `ttft_p95`, or without one the end-to-end times.
Figure = tuple[Unit, Callable[[Result], float | None]]
_FIGURES: dict[str, Figure] = {
    "requests": ("", lambda result: result.total.counts.num),
    "errors": ("", lambda result: result.total.num_failed),
    "error_rate": ("share", lambda result: result.total.num_failed / result.total.counts.num if result.total.counts.num else None),
    "retries": ("", lambda result: result.total.counts.num_retries),
    "throughput": ("/s", lambda result: result.total.requests_per_second),
    "goodput": ("/s", lambda result: result.total.goodput),
    "goodput_share": ("share", share_good),
    "tokens_per_second": ("/s", lambda result: result.total.tokens_per_second),
    "knee": ("/s", lambda result: None if result.sweep is None else result.sweep.knee),
}
_MEASURED = {f"{measure}_{figure}": (measure, figure) for measure in MEASURES for figure in _PERCENTILES}
_MEASURED |= {figure: ("e2e", figure) for figure in _PERCENTILES}
_ALL_FIGURES: dict[str, Figure] = _FIGURES | {name: ("s", partial(_time, *pair)) for name, pair in _MEASURED.items()}
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "constant": ("words",),
    "uniform": ("least", "most"),
    "normal": ("mean", "deviation"),
    "lognormal": ("mean", "deviation"),
}


class Condition(msgspec.Struct, frozen=True):
    """A comparison that makes a run fail where it holds."""

    text: str  # as it was written
    name: str  # of the figure
    sign: str  # comparison operator
    limit: float  # with what

    def check(self, result: Result) -> Check:
        """Compare; what could not be measured fails too."""
        unit, measure = find_figure(self.name)
        value = measure(result)
        return Check(self.text, value, value is None or bool(_COMPARE[self.sign](value, self.limit)), unit)


def find_figure(name: str) -> Figure:
    """Return the unit and the value of a figure; raises `InputError` if there is none of that name."""
    if name.isupper():  # a status
        return "", lambda result: float(result.total.counts.failures.get(name, 0))
    if name not in _ALL_FIGURES:
        raise InputError(
            f"--fail-on: {name}: not one of {', '.join(_FIGURES)}, a percentile such as p95 or ttft_p99, or a gRPC status"
        )
    return _ALL_FIGURES[name]


def parse_number(text: str, flag: str) -> float:
    """Read a number, or a share as a part of 1: `0.5`, `50%`; raises `InputError` if it is not that."""
    value, unit = _parse(text, flag)
    if unit in _TIMES:
        raise InputError(f"{flag}: {text}: is a time, where a number is wanted, or one with %")
    return value


def parse_time(text: str, flag: str) -> float:
    """Read a time, which has a unit: `500ms`, `0.5s`, `200us`; return seconds, or raise `InputError` if it is not that."""
    value, unit = _parse(text, flag)
    if not unit:
        raise InputError(f"{flag}: {text}: a time needs its unit: write {text}ms or {text}s")
    if unit not in _TIMES:
        raise InputError(f"{flag}: {text}: not a time such as 500ms or 0.5s")
    return value


def _parse_positive_time(text: str, flag: str) -> float:
    if value := parse_time(text, flag):
        return value
    raise InputError(f"{flag}: {text}: not a time over 0")


def _parse(text: str, flag: str) -> tuple[float, str]:
    """Return a number in its unit's base, and the unit."""
    match = _NUMBER.fullmatch(text)
    value = math.inf if match is None else float(match[1]) * _UNITS[match[2]]
    if match is None or not math.isfinite(value):
        raise InputError(f"{flag}: {text}: not a number, or one with s, ms, us or %")
    return value, match[2]


def _parts(text: str) -> list[tuple[str, str, str]]:
    """Split `NAME=VALUE,...` into name, equals sign if any, and value of each part."""
    return [part.strip().partition("=") for part in text.split(",") if part]


def parse_slos(text: str) -> dict[str, float]:
    """Read `e2e=500ms,ttft=100ms` into limits in seconds; raises `InputError` if it is not that."""
    slos: dict[str, float] = {}
    for name, _, value in _parts(text):
        if name not in SLO_MEASURES:
            raise InputError(f"--slo: {name}: not one of {', '.join(SLO_MEASURES)}")
        if name in slos:
            raise InputError(f"--slo: {name}: is there twice")
        slos[name] = _parse_positive_time(value.strip(), f"--slo {name}")
    return slos


def parse_conditions(text: str) -> list[Condition]:
    """Read `errors>0,p95>500ms`: times have a unit; raises `InputError` if it is not that, or names what is not measured."""
    conditions = []
    for part in filter(None, text.split(",")):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise InputError(f"--fail-on: {part}: not of the form NAME>NUMBER")
        name, sign, number = match.groups()
        (unit, _), flag = find_figure(name), f"--fail-on {name}"
        limit = parse_time(number, flag) if unit == "s" else parse_number(number, flag)
        if number.endswith("%") and unit != "share":
            raise InputError(f"{flag}: {number}: not a number; parts of all requests are error_rate and goodput_share")
        conditions.append(Condition(part.strip(), name, sign, limit))
    return conditions


def parse_shares(text: str, flag: str) -> dict[str, float]:
    """Read `unary=0.7,stream=0.3`, or a name alone for all of it; numbers count by their ratio."""
    shares = {name: parse_number(value, flag) if equals else 1.0 for name, equals, value in _parts(text)}
    total = math.fsum(shares.values())
    if not total:
        raise InputError(f"{flag}: {text}: names nothing with a share over 0")
    return {name: share / total for name, share in shares.items() if share}


def parse_lengths(text: str) -> Lengths:
    """Read `KIND:NUMBER[:NUMBER]`, or a number alone for `constant`; raises `InputError` if it is not that."""
    kind, _, rest = text.partition(":")
    if not rest:
        kind, rest = "constant", text
    names = _PARAMETERS.get(kind)
    if names is None:
        raise InputError(f"--words: {kind}: not one of {', '.join(_PARAMETERS)}")
    try:
        numbers = tuple(float(number) for number in rest.split(":"))
    except ValueError as error:
        raise InputError(f"--words: {rest}: not numbers with colons between") from error
    if len(numbers) != len(names):
        raise InputError(f"--words: {kind} takes {' and '.join(names)}")
    is_in_range = all(0 <= number <= MOST_WORDS for number in numbers) and numbers[0] >= 1  # not so for NaN either
    if not is_in_range or (kind == "uniform" and numbers[1] < 1):
        raise InputError(f"--words: lengths are 1 to {MOST_WORDS}, a deviation is 0 or more")
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise InputError("--words: uniform: the least is above the most")
    return Lengths(kind, numbers)  # type: ignore[arg-type]


def parse_mix(text: str) -> dict[Kind, float]:
    """Read the shares of the kinds of call; raises `InputError` if it is not that."""
    shares = parse_shares(text, "--mix")
    try:
        return msgspec.convert(shares, dict[Kind, float])
    except msgspec.ValidationError as error:
        raise InputError(f"--mix: {text}: not shares of {', '.join(KINDS)}") from error


def parse_beams(text: str) -> dict[int, float]:
    """Read the shares of widths of beam search; raises `InputError` if it is not that."""
    shares = parse_shares(text, "--num-beams") if text else {}
    for width in shares:
        if not width.isdecimal() or not 0 < int(width) < 2**32:
            raise InputError(f"--num-beams: {width}: not a width")
    return {int(width): share for width, share in shares.items()}


def parse_injections(text: str) -> Injections:
    """Read `cancel=0.1:20ms,malformed=1%`: shares of all calls, and for those that have one a time.

    Raises:
        InputError: If it is not that, or the shares are more than 1 together.
    """
    values: dict[str, float] = {}
    for name, _, rest in _parts(text):
        share, colon, seconds = rest.partition(":")
        flag = f"--misbehave {name}"
        if name not in Injections().shares():
            raise InputError(f"--misbehave: {name}: not one of {', '.join(Injections().shares())}")
        values[f"{name}_share"] = parse_number(share, flag)
        if colon and f"{name}_seconds" not in Injections.__struct_fields__:
            raise InputError(f"{flag}: {seconds}: takes no time")
        if colon:
            values[f"{name}_seconds"] = _parse_positive_time(seconds, flag)
    injections = Injections(**values)
    if sum(injections.shares().values()) > 1 + 1e-9:
        raise InputError("--misbehave: the shares are more than 1 together")
    return injections


def parse_fields(texts: Iterable[str]) -> Fields:
    """Read fields of a request, `NAME=VALUE` each; a list has commas between its numbers.

    Raises:
        InputError: If there is no such field, it has a flag of its own, or the value is of another type.
    """
    found: Fields = {}
    for text in texts:
        name, _, value = text.partition("=")
        field = GenerateRequest.DESCRIPTOR.fields_by_name.get(name)
        if field is None or name in _OF_FLAGS:
            known = [each.name for each in GenerateRequest.DESCRIPTOR.fields if each.name not in _OF_FLAGS]
            raise InputError(f"--field: {name}: not one of {', '.join(known)}")
        try:
            if field.cpp_type == field.CPPTYPE_STRING:
                found[name] = value
            elif field.cpp_type == field.CPPTYPE_BOOL:
                found[name] = {"true": True, "false": False}[value.lower()]
            elif field.cpp_type == field.CPPTYPE_FLOAT:
                found[name] = float(value)
            else:
                found[name] = [int(each) for each in value.split(",")] if field.is_repeated else int(value)
        except (KeyError, ValueError):
            kind = "true or false" if field.cpp_type == field.CPPTYPE_BOOL else "a number"
            raise InputError(f"--field {name}: {value}: not {kind}") from None
    return found
