"""Pictures of what shipped models look at, one for each kind of attention that there is.

    python -m benchmarks.architectures.gallery --en-de model/pretrained/en-de --en-fr model/pretrained/en-fr \
        [--rnn CHECKPOINT] [--lm CHECKPOINT] [--output docs/images]

A picture is drawn where the checkpoint is given that it is of; the others are left as they are.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dragoman.attention.maps import PICTURE_ROOM, Kind
from dragoman.attention.of_checkpoint import look_into
from dragoman.attention.picture import draw
from dragoman.model.files import replaced

ROOT: Final = Path(__file__).parents[2]
MAX_BYTES: Final = 200_000
MAX_NEW_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One picture.

    Attributes:
        name: Of the file, less its ending.
        model: Which checkpoint it is of, by its option.
        source: What it reads; what it says is its greedy answer.
        kind: What looks at what.
        layer: From 0; None for all.
    """

    name: str
    model: str
    source: str
    kind: Kind
    layer: int | None


DOG: Final = "A brown dog runs through the snow with a red ball in its mouth."
GIRL: Final = "A little girl in a pink dress is climbing up some wooden stairs."
EXHIBITS: Final = (
    Exhibit("attention-encoder", "en_de", DOG, Kind.ENCODER, 1),
    Exhibit("attention-encoder-deep", "en_de", DOG, Kind.ENCODER, 5),
    Exhibit("attention-decoder", "en_de", DOG, Kind.DECODER, 0),
    Exhibit("attention-cross", "en_de", DOG, Kind.CROSS, 2),
    Exhibit("attention-cross-layers", "en_de", "Two men play soccer on a field.", Kind.CROSS, None),
    Exhibit("attention-cross-french", "en_fr", GIRL, Kind.CROSS, 2),
    Exhibit("attention-rnn", "rnn", DOG, Kind.CROSS, None),
    Exhibit("attention-language-model", "lm", "A brown dog runs", Kind.DECODER, 0),
)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for model in dict.fromkeys(exhibit.model for exhibit in EXHIBITS):
        parser.add_argument(f"--{model.replace('_', '-')}", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images")
    arguments = parser.parse_args()
    for exhibit in EXHIBITS:
        checkpoint: Path | None = getattr(arguments, exhibit.model)
        if checkpoint is None:
            continue
        look = look_into(
            checkpoint,
            exhibit.source,
            None,
            PICTURE_ROOM,
            kinds=[exhibit.kind],
            layer=exhibit.layer,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        path: Path = arguments.output / f"{exhibit.name}.png"
        with replaced(path) as temporary:
            draw(temporary, look)
        size = path.stat().st_size
        assert size <= MAX_BYTES, f"{path}: {size} bytes; a picture of the documents takes {MAX_BYTES} at most"
        print(f"{path}: {size:,} bytes; {look.target}")


if __name__ == "__main__":
    main()
