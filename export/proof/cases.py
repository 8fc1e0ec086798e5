"""Cases of the comparison: teacher-forced rows, pairs to score, and texts to answer; the same ones in every export."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dragoman.export.architectures import architecture_of
from dragoman.export.proof.eager import Allowance, DoublePrecision, EagerPass, Floats, Ints
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.decode import pad
from dragoman.model.networks.network import Network

NUM_ROWS = 24
# Above this size, few rows are compared over the whole vocabulary, the others over the best: sorting takes most of a step.
LARGE_VOCABULARY, NUM_WHOLE_ROWS, NUM_BEST = 2**16, 3, 512
NUM_RANDOM_SENTENCES, NUM_RANDOM_CHECKED = 200, 49
MAX_ROW_TOKENS, MAX_SENTENCE_TOKENS, MAX_LONGEST_ROW = 32, 24, 1024
SENTENCES = (
    "Two children are building a sandcastle on the beach.",
    "The train to the coast leaves at 7:45 from platform 3.",
    "She had never seen so many stars, and neither had he!",
    "Why does the kettle whistle?",
    "A man in a red jacket is repairing the roof of a small wooden house while his neighbour holds the ladder.",
    "Ein Hund läuft über die verschneite Wiese.",
    "Können Sie mir bitte sagen, wo der nächste Bahnhof ist?",
    "Le chat dort sur le canapé depuis ce matin.",
    "L’été dernier, nous avons marché jusqu’à la mer.",
    "Mañana compraré pan, queso y unas naranjas.",
    "お茶を一杯ください。",
    "Вчера весь день шёл дождь.",
    "x = 3.14159; y = -x ** 2",
    "🙂 ok",
    "a",
)
# Positions whose log-probabilities the eager model computes together; length above which a row is cut; positions of its end.
BLOCK_POSITIONS, LONG_ROW, END_POSITIONS = 32, 64, 16


@dataclass(frozen=True, slots=True)
class EagerStretch:
    """A stretch of a long row, which begins with caches of the eager model instead of decoding the positions before it."""

    start: int  # its first position
    whole: EagerPass  # the eager model's pass over the whole row


@dataclass(slots=True)
class Row:
    """One sequence that is decoded, and the candidates it was given."""

    source: list[int]  # source ids, as the model encodes them, see `Network.prompt`
    inputs: list[int]  # fed tokens, the decoder's first included; a greedy row grows by its choices
    num_steps: int  # the position after its last possible step
    eos_id: int | None = None  # token that ends a greedy row early; None in a teacher-forced row
    stretch: EagerStretch | None = None  # where a row begins that does not begin at position 0
    choices: list[int] = field(default_factory=list)  # the first candidate, step by step
    log_probs: list[float] = field(default_factory=list)  # its log-probabilities
    digest: str = ""  # of every candidate and log-probability it was given

    @property
    def position(self) -> int:
        """The position of the token to feed next."""
        return (self.stretch.start if self.stretch is not None else 0) + len(self.log_probs)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.position == self.num_steps or (self.eos_id is not None and self.inputs[-1] == self.eos_id and self.position > 0)

    def __str__(self) -> str:
        """Name its lengths."""
        return f"a row with {len(self.source)} source and {self.num_steps} target tokens"

    def again(self) -> "Row":
        """Return the same teacher-forced row, not decoded yet."""
        return Row(self.source, self.inputs, self.num_steps, stretch=self.stretch)

    def take(self, ids: Ints, log_probs: Floats) -> None:
        """Take one step's candidates, `[K]` each."""
        self.digest = hashlib.sha256(self.digest.encode() + ids.tobytes() + log_probs.tobytes()).hexdigest()
        self.choices.append(int(ids[0]))
        self.log_probs.append(float(log_probs[0]))
        if self.eos_id is not None:
            self.inputs.append(int(ids[0]))


@dataclass(frozen=True, slots=True)
class Pair:
    """A source as the model encodes it, a target with end-of-sequence, and the decoder's first input; None for the model's."""

    source: list[int]
    target: list[int]
    decoder_start_id: int | None = None


def pair_of(row: Row, eos_id: int) -> Pair:
    """Return a row as a pair to score, whose target ends with end-of-sequence."""
    return Pair(row.source, [*row.inputs[1:], eos_id], row.inputs[0])


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Ints, Ints]:
    """Stack rows of different lengths into `[B, longest]`, filled up on the right; return them with their lengths `[B]`."""
    return pad(rows, pad_id).numpy(), np.array([len(row) for row in rows], np.int64)


class EagerReference:
    """Full-sequence passes of the eager model, one for each row, and their next-token log-probabilities."""

    def __init__(self, model: Network) -> None:
        """Use a model in evaluation mode."""
        self.model = model
        self.blocks: dict[int, tuple[int, Floats]] = {}
        self.double = DoublePrecision(model)
        self._passes: dict[tuple[tuple[int, ...], int, tuple[int, ...]], EagerPass] = {}

    def whole(self, source: list[int], target: list[int], first: int | None = None) -> EagerPass:
        """Return the pass over a source and a target, see `EagerPass`; the same one every time."""
        first = self.model.config.decoder_start_id if first is None else first
        key = tuple(source), first, tuple(target)
        if key not in self._passes:
            self._passes[key] = EagerPass(self.model, source, target, len(target) > LONG_ROW, first)
        return self._passes[key]

    def allowance(self, whole: EagerPass) -> Allowance:
        """Return the largest difference from double precision that is accepted."""
        return self.double.allowance(whole, self._passes.values())

    def of_row(self, row: Row) -> EagerPass:
        """Return the pass over a teacher-forced row, which end-of-sequence follows."""
        if row.stretch is not None:
            return row.stretch.whole
        return self.whole(row.source, [*row.inputs[1:], self.model.config.eos_id], row.inputs[0])

    def log_probs(self, rows: Sequence[Row]) -> Floats:
        """Return the log-probabilities expected of each row's next step, `[n, V]`."""
        return np.stack([self._next(row) for row in rows])

    def _next(self, row: Row) -> Floats:
        """Return those of one row, `[V]`, computed for a block of positions together: each product reads the whole vocabulary."""
        start, block = self.blocks.get(id(row), (row.position, None))
        if block is None or row.position >= start + len(block):
            start = row.position
            block = self.of_row(row).log_probs(start, min(start + BLOCK_POSITIONS, row.num_steps))
            self.blocks[id(row)] = start, block
        log_probs: Floats = block[row.position - start]
        if row.position == row.num_steps - 1:
            del self.blocks[id(row)]
        return log_probs


def stretches(reference: EagerReference, row: Row) -> list[Row]:
    """Cut a long row into its beginning, its end, and the positions around every power of two between them.

    Steps in between would read every weight once each and prove little more: a step's arithmetic depends on its position through
    the position table alone, every line of which the scorer's comparison covers.

    Args:
        reference: Makes the eager model's pass over it.
        row: Teacher-forced; one of up to `LONG_ROW` positions stays whole.

    Returns:
        The stretches, each with the eager model's caches.
    """
    if row.num_steps <= LONG_ROW:
        return [row]
    powers = [2**i for i in range(LONG_ROW.bit_length() - 1, row.num_steps.bit_length()) if 2**i < row.num_steps - 2]
    spans = [(0, LONG_ROW // 2), *((power - 2, power + 2) for power in powers), (row.num_steps - END_POSITIONS, row.num_steps)]
    whole = reference.of_row(row)
    return [Row(row.source, row.inputs, stop, stretch=EagerStretch(start, whole)) for start, stop in spans]


def forced_rows(config: ModelConfig) -> list[Row]:
    """Draw teacher-forced rows: random lengths, the shortest there can be, and one as long as the model goes (up to 1,024)."""
    random = np.random.default_rng(1)
    if architecture_of(config).has_prompts:
        return _rows_of_prompts(config, random)

    def row(num_source: int, num_target: int) -> Row:
        source = _random_ids(random, config.source_vocab_size, config.pad_id, num_source - 1)
        target = _random_ids(random, config.target_vocab_size, config.pad_id, num_target - 1)
        return Row([*source, config.eos_id], [config.decoder_start_id, *target], num_target)

    max_source, max_target = min(config.max_source_positions, MAX_ROW_TOKENS), min(config.max_target_positions, MAX_ROW_TOKENS)
    lengths = [(int(random.integers(1, max_source + 1)), int(random.integers(1, max_target + 1))) for _ in range(NUM_ROWS - 2)]
    longest = min(config.max_source_positions, MAX_LONGEST_ROW), min(config.max_target_positions, MAX_LONGEST_ROW)
    return [row(*pair) for pair in ((1, max_target), *lengths[: NUM_ROWS // 2], longest, *lengths[NUM_ROWS // 2 :])]


def _rows_of_prompts(config: ModelConfig, random: np.random.Generator) -> list[Row]:
    """Draw the same for a model whose sources are prompts, which share room with targets; one is empty, one has one token."""
    room, most = config.max_target_positions, config.max_source_positions - 1  # the start token begins a prompt

    def row(num_source: int, num_target: int) -> Row:
        source = _random_ids(random, config.source_vocab_size, config.pad_id, min(num_source, most))
        target = _random_ids(random, config.target_vocab_size, config.pad_id, min(num_target, room - len(source)) - 1)
        return Row(source, [config.decoder_start_id, *target], 1 + len(target))

    longest = min(room, 2 * MAX_LONGEST_ROW)
    first = [row(0, MAX_ROW_TOKENS), row(1, MAX_ROW_TOKENS), row(longest // 2, MAX_LONGEST_ROW), row(longest - 1, 2)]
    lengths = [(int(random.integers(0, MAX_ROW_TOKENS + 1)), int(random.integers(1, MAX_ROW_TOKENS + 1))) for _ in range(NUM_ROWS)]
    rest = [row(*pair) for pair in lengths[: NUM_ROWS - len(first)]]
    return [*first[:2], *rest[: NUM_ROWS // 2], *first[2:], *rest[NUM_ROWS // 2 :]]


def num_whole_rows(num_rows: int, vocab_size: int) -> int:
    """Return how many rows are compared over the whole vocabulary."""
    return num_rows if vocab_size <= LARGE_VOCABULARY else NUM_WHOLE_ROWS


def max_candidates(vocab_size: int) -> int:
    """Return how many candidates the other rows are compared over."""
    return vocab_size if vocab_size <= LARGE_VOCABULARY else NUM_BEST


def by_candidates(rows: Sequence[Row], vocab_size: int) -> list[tuple[list[Row], int]]:
    """Group rows by the number of candidates compared: all, or for most rows of a large vocabulary the best."""
    if vocab_size <= LARGE_VOCABULARY:
        return [(list(rows), vocab_size)]
    whole = hardest_first(rows)[:NUM_WHOLE_ROWS]
    rest = [row for row in rows if all(row is not other for other in whole)]
    return [(whole, vocab_size), (rest, NUM_BEST)]


def hardest_first(rows: Sequence[Row]) -> list[Row]:
    """Order rows for decoding them again: the end of a long row, then rows that begin at position 0."""
    ends = [row for row in rows if row.stretch is not None][-1:]
    return ends + [row for row in rows if row.stretch is None]


def greedy_sources(checkpoint: Checkpoint) -> list[list[int]]:
    """Return ids of texts, without special tokens: random ones of many lengths, and sentences."""
    config = checkpoint.model.config
    random = np.random.default_rng(2)
    room = config.max_source_positions - 1  # one token ends a source, or begins a prompt
    if architecture_of(config).has_prompts:
        room = min(room, config.max_target_positions // 2)  # the other half is for the answer
    lengths = random.integers(0, min(room, MAX_SENTENCE_TOKENS) + 1, NUM_RANDOM_SENTENCES)
    sources = [_random_ids(random, config.source_vocab_size, config.pad_id, int(length)) for length in lengths]
    # The last of the random ones, with which int8 is also calibrated.
    return sources[-NUM_RANDOM_CHECKED:] + [ids[:room] for ids in checkpoint.tokenizers.source.encode_batch(SENTENCES)]


def greedy_rows(model: Network, sources: Sequence[list[int]], max_new_tokens: int) -> list[Row]:
    """Return greedy rows, not decoded yet, of texts with these ids."""
    config = model.config
    prompts = [model.prompt(ids) for ids in sources]
    return [Row(source, [first], min(config.room_after(len(source)), max_new_tokens), config.eos_id) for source, first in prompts]


def _random_ids(random: np.random.Generator, vocab_size: int, pad_id: int, length: int) -> list[int]:
    """Draw ids, padding excluded."""
    ids: list[int] = (pad_id + 1 + random.integers(0, vocab_size - 1, length)).tolist()
    return [i % vocab_size for i in ids]
