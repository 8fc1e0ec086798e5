"""What tokenisers are compared on: texts that nobody writes, in many scripts, and ids that no model predicts."""

import random
from collections.abc import Sequence

from dragoman.model.text.tokenizer import Tokenizer

_BLOCKS = (
    *((0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F)),
    *((0x1100, 0x11FF), (0x2000, 0x206F), (0x2100, 0x21FF), (0x3000, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xAD00)),
    *((0xFB00, 0xFB4F), (0xFF00, 0xFFEF), (0x1D400, 0x1D4FF), (0x1F300, 0x1F6FF), (0x0, 0x1F), (0x7F, 0x9F)),
)
_ODD = (
    *(
        "  ",
        "\u00a0",
        "\u3000",
        "\t",
        "\n",
        "\r\n",
        "\u200b",
        "\u2581",
        " \u2581 ",
        "\ufeff",
        "\u00ad",
        "e\u0301",
        "\ufb01",
        "①",
        "Ⅷ",
    ),
    *("</s>", "<unk>", "<s>", "<pad>", "<mask>", "<0x41>", "<2de>", ">>fra<<", "deu_Latn", "<extra_id_0>", "[MASK]", "…"),
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",  # a family of three, one character to a reader
)
_LONGEST_ROW = 20


def strings(count: int, words: Sequence[str], seed: int = 7) -> list[str]:
    """Return random texts: words, characters of many scripts, odd spaces, names of special tokens."""
    choice = random.Random(seed)
    found = []
    for _ in range(count):
        parts = [_part(choice, words) for _ in range(choice.randint(1, 12))]
        if choice.random() < 0.3:
            found.append(choice.choice(["", " "]).join(parts))
        else:
            found.append(choice.choice(["", " ", "  "]) + " ".join(parts) + choice.choice(["", "", " ", "\n"]))
    return found


def _part(choice: random.Random, words: Sequence[str]) -> str:
    kind = choice.random()
    if kind < 0.5:
        return choice.choice(words)
    if kind < 0.8:
        first, last = choice.choice(_BLOCKS)
        return "".join(chr(choice.randint(first, last)) for _ in range(choice.randint(1, 5)))
    return choice.choice(_ODD) if kind < 0.9 else "".join(map(chr, choice.sample(range(0x20, 0x3000), 3)))


def id_rows(tokenizer: Tokenizer, texts: Sequence[str], seed: int = 1) -> list[list[int]]:
    """Return as many sequences of ids as texts: half of them random, half the texts'."""
    choice = random.Random(seed)
    half = len(texts) // 2
    rows = [[choice.randrange(tokenizer.vocab_size) for _ in range(choice.randint(1, _LONGEST_ROW))] for _ in range(half)]
    return rows + tokenizer.encode_batch(texts[half:])
