"""Calls: kind, requests and misbehaviour, drawn from the seed and the call's number alone."""

import gzip
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dragoman.client.request import fill
from dragoman.load.plan import Kind, Plan
from dragoman.load.schedule import Entry
from dragoman.model.errors import InputError
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


# Everyday words, so that a generated sentence costs about as many tokens as a real one of its length.
_WORDS: Sequence[str] = (  # noqa: SIM905
    "a the man woman child dog horse bird two three young old small large red blue green white black street field water beach "
    "mountain snow grass road wall house table bench car boat train bicycle ball shirt hat jacket camera guitar crowd group people "
    "walks runs sits stands plays holds looks jumps rides climbs sings reads watches smiles waits in on at near behind under over "
    "through with and while beside into from"
).split()


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
        work = self._plan.work
        fields: dict[str, object] = {"no_cache": True, **work.fields, "request_id": request_id, "text": self._text(draws, entry)}
        if work.beams:
            fields["num_beams"] = _draw(work.beams, draws)
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


def read_texts(path: Path) -> list[str]:
    """Return the lines of a file that are not blank; raises `InputError` if it cannot be read, is not UTF-8 or has none."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = file.read().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from error
    except (EOFError, zlib.error) as error:
        raise InputError(f"{path}: not a whole gzip file") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise InputError(f"{path}: has no text")
    return texts


def generate_text(num_words: int, draws: random.Random) -> str:
    """Return a sentence of so many words."""
    return " ".join(draws.choices(_WORDS, k=num_words)).capitalize() + "."
