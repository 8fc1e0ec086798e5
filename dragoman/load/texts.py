"""Sources of requests: lines of a file, or generated sentences of given lengths."""

import gzip
import math
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dragoman.model.errors import InputError

Distribution = Literal["constant", "uniform", "normal", "lognormal"]
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "constant": ("words",),
    "uniform": ("least", "most"),
    "normal": ("mean", "deviation"),
    "lognormal": ("mean", "deviation"),
}
MOST_WORDS = 10_000

# Everyday words, so that a generated sentence costs about as many tokens as a real one of its length.
_WORDS: Sequence[str] = (  # noqa: SIM905
    "a the man woman child dog horse bird two three young old small large red blue green white black street field water beach "
    "mountain snow grass road wall house table bench car boat train bicycle ball shirt hat jacket camera guitar crowd group people "
    "walks runs sits stands plays holds looks jumps rides climbs sings reads watches smiles waits in on at near behind under over "
    "through with and while beside into from"
).split()


class Lengths(msgspec.Struct, frozen=True):
    """Distribution of the number of words of a generated source."""

    # `constant:N`, `uniform:LEAST:MOST`, `normal:MEAN:DEVIATION` or `lognormal:MEAN:DEVIATION`; the two of the last are those of
    # the lengths, not of their logarithms.
    kind: Distribution
    parameters: tuple[float, ...]  # the numbers

    def draw(self, draws: random.Random) -> int:
        """Return a length, 1 to `MOST_WORDS`."""
        match self.kind:
            case "constant":
                value = self.parameters[0]
            case "uniform":
                value = float(draws.randint(round(self.parameters[0]), round(self.parameters[1])))
            case "normal":
                value = draws.gauss(*self.parameters)
            case "lognormal":
                mean, deviation = self.parameters
                variance = math.log1p((deviation / mean) ** 2)
                value = draws.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
        return min(max(1, round(value)), MOST_WORDS)


def parse_lengths(text: str) -> Lengths:
    """Read `KIND:NUMBER[:NUMBER]`, or a number alone for `constant`.

    Raises:
        InputError: If it is not that.
    """
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


def read_texts(path: Path) -> list[str]:
    """Return the lines of a file that are not blank.

    Raises:
        InputError: If it cannot be read, is not UTF-8 or has no such lines.
    """
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
