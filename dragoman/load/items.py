"""Calls: kind, requests and misbehaviour, drawn from the seed and the call's number alone."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dragoman.client.request import fill
from dragoman.load.plan import Kind, Plan
from dragoman.load.schedule import Entry
from dragoman.load.texts import generate_text, read_texts
from dragoman.v1 import generation_pb2

T = TypeVar("T")

# Each of them is wrong whatever the model is.
_MALFORMED: tuple[dict[str, object], ...] = (
    {"text": " "},
    {"max_new_tokens": 0},
    {"num_beams": 4_000_000_000},
    {"do_sample": True, "temperature": -1.0},
    {"priority": 1000},
    {"model": "a-model-that-nobody-has"},
)
REFUSALS = frozenset({"INVALID_ARGUMENT", "NOT_FOUND"})


@dataclass(frozen=True, slots=True)
class Item:
    """One call."""

    kind: Kind  # method
    injection: str  # misbehaviour: `cancel`, `deadline`, `slow` or `malformed`; empty for none
    requests: list[generation_pb2.GenerateRequest]  # several for a batch

    @property
    def group(self) -> str:
        """Group for counting: the misbehaviour, or the kind of call."""
        return self.injection or self.kind


class Items:
    """Makes calls by their numbers, the same however many processes share them."""

    def __init__(self, plan: Plan) -> None:
        """Read the texts; raises `InputError` if they cannot be read."""
        self._plan = plan
        self._texts = [] if plan.work.texts is None else read_texts(Path(plan.work.texts))

    def make(self, number: int, entry: Entry | None = None) -> Item:
        """Return the call of a number; what the entry of a trace says goes before what is drawn."""
        draws = random.Random(f"{self._plan.seed} {number}")
        work = self._plan.work
        shares = self._plan.injections.shares()
        injection = _draw({**shares, "": max(0.0, 1.0 - sum(shares.values()))}, draws)
        kind = _draw(work.mix, draws)
        if injection == "slow":
            kind = "stream"
        elif injection == "malformed" and kind == "batch":
            kind = "unary"
        requests = [
            self._request(f"{self._plan.run_id}-{number}-{place}", draws, entry)
            for place in range(work.batch_size if kind == "batch" else 1)
        ]
        if injection == "malformed":
            fill(requests[0], draws.choice(_MALFORMED))
        return Item(kind, injection, requests)

    def _request(self, request_id: str, draws: random.Random, entry: Entry | None) -> generation_pb2.GenerateRequest:
        fields: dict[str, object] = {**self._plan.work.fields, "request_id": request_id, "text": self._text(draws, entry)}
        beams = self._plan.work.beams
        if beams:
            fields["num_beams"] = _draw(beams, draws)
        if entry is not None:
            fields |= {name: value for name in ("num_beams", "max_new_tokens") if (value := getattr(entry, name)) is not None}
        return fill(generation_pb2.GenerateRequest(), fields, request_id)

    def _text(self, draws: random.Random, entry: Entry | None) -> str:
        if entry is not None and entry.text is not None:
            return entry.text
        if entry is not None and entry.words is not None:
            return generate_text(entry.words, draws)
        return draws.choice(self._texts) if self._texts else generate_text(self._plan.work.words.draw(draws), draws)


def _draw(shares: Mapping[T, float], draws: random.Random) -> T:
    """Return one of the keys, as often as its share says; where there is one only, nothing is drawn."""
    if len(shares) == 1:
        return next(iter(shares))
    return draws.choices(list(shares), list(shares.values()))[0]
