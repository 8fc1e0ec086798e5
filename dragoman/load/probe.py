"""One call of each kind before a run, which counts nowhere: what is wrong is known at once, in the server's own words."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dragoman.client.aio import AsyncClient
from dragoman.client.errors import CallError, Overloaded, Unimplemented
from dragoman.load.calls import Caller
from dragoman.load.connection import open_channel, split_target
from dragoman.load.items import Item, Items
from dragoman.load.plan import Injections, Plan, Server
from dragoman.load.schedule import read_trace
from dragoman.load.show import one_line
from dragoman.load.tally import MEANINGS, Outcome
from dragoman.model.errors import InputError
from dragoman.v1 import generation_pb2, generation_pb2_grpc

# A server that has just been started may need longer for its first answer than a call of the run may take.
PATIENCE_SECONDS = 10.0
NUM_RETRIES = 4
# The shortest of so many sources is sent: one that is too long among many is a failure of the run, not the end of it.
_NUM_DRAWN = 16
# Flags of fields that have one of their own.
_FLAGS = {"model": "--model", "num_beams": "--num-beams", "source_language": "--from", "target_language": "--to"}
# Faults of the options, whatever the server has.
_MISTAKES = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE"})


class Findings(NamedTuple):
    """Findings of a probe."""

    models: list[dict[str, str]]  # models by `ListModels`, each once; empty where it is not implemented
    warnings: list[str]  # reasons for doubt


async def probe(plan: Plan) -> Findings:
    """Ask each server of a plan what it has, and make one call of each kind and width of search, one after another.

    Raises:
        InputError: If the server refuses what the plan asks, or it cannot even be put in a message.
        CallError: If a server cannot be reached or fails; the message names it.
    """
    models: list[dict[str, str]] = []
    warnings: list[str] = []
    for target in split_target(plan.server.target):
        server = msgspec.structs.replace(plan.server, target=target)
        name = target.removeprefix("ipv4:").removeprefix("ipv6:")
        try:
            models += [model for model in await list_models(server) if model not in models]
            for item in probe_items(plan):
                await _try(msgspec.structs.replace(plan, server=server), item)
        except Overloaded as error:
            warnings.append(f"{name} refused calls already before the run: {one_line(error.message)}")
        except CallError as error:
            words = one_line(error.message)
            words = words if words.startswith(f"{name}: ") else f"{name}: {_with_flag(words)}"  # some messages name it already
            if error.code in _MISTAKES:
                raise InputError(f"{words} ({error.code})") from error
            raise CallError(words, error.request_id, code=error.code) from error
    return Findings(models, warnings)


def _with_flag(message: str) -> str:
    """Return the server's message with the flag in place of the request's field that it begins with."""
    name, colon, reason = message.partition(": ")
    is_field = colon and name != "text" and name in generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    return f"{_FLAGS.get(name, f'--field {name}')}: {reason}" if is_field else message


async def list_models(server: Server) -> list[dict[str, str]]:
    """Return the models of a server, none where it does not implement `ListModels`; raises as `probe`."""
    try:
        client = AsyncClient(
            server.target,
            timeout_seconds=PATIENCE_SECONDS,
            credentials=server.credentials(),
            token=server.token,
            options=server.options(),
        )
    except ValueError as error:
        raise InputError(f"--{error}".replace("--target", "--server", 1)) from error
    async with client:
        try:
            models = await client.models()
        except Unimplemented:
            return []
    names = ("name", "version", "precision", "device", "max_slots")
    return [{name: str(getattr(model, name)) for name in names} for model in models]


def probe_items(plan: Plan) -> Iterator[Item]:
    """Yield a call of each kind and each width of search, with a short one of the plan's sources."""
    widths: list[dict[int, float]] = [{width: 1.0} for width in plan.work.beams] or [{}]
    for number, (kind, width) in enumerate(itertools.product(plan.work.mix, widths)):
        work = msgspec.structs.replace(plan.work, mix={kind: 1.0}, beams=width)
        one = msgspec.structs.replace(plan, work=work, injections=Injections(), run_id=f"{plan.run_id}-probe-{number}")
        items = Items(one)
        entries = itertools.repeat(None) if plan.trace is None else read_trace(Path(plan.trace))
        drawn = [items.make(place, entry) for place, entry in enumerate(itertools.islice(entries, _NUM_DRAWN))]
        yield min(drawn, key=lambda item: max(len(request.text) for request in item.requests))


async def _try(plan: Plan, item: Item) -> None:
    """Make a call as the run will make it, but with more patience; raises `CallError` if one of its requests fails."""
    patient = msgspec.structs.replace(
        plan, injections=Injections(), num_retries=NUM_RETRIES, timeout_seconds=max(plan.timeout_seconds, PATIENCE_SECONDS)
    )
    outcomes: list[Outcome] = []
    async with open_channel(plan.server) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        await Caller(patient, stub, outcomes.append, time.monotonic).call(item, 0.0)
    for outcome in outcomes:
        if not outcome.is_ok:
            if outcome.code == "DEADLINE_EXCEEDED":
                outcome.message = f"no answer within {patient.timeout_seconds:g} s"
            message = outcome.message or MEANINGS.get(outcome.code, "the server gave no reason")
            raise Overloaded(message) if outcome.code == Overloaded.default_code else CallError(message, code=outcome.code)
