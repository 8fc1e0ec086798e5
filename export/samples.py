"""Sample answers, `samples.json`: what a bundle's graphs answered when it was exported, for whoever serves it to ask again.

The server imports this file, so it imports neither torch nor ONNX. Sources are ids as an engine gets them, with all that is said
around a text, so that no tokeniser is needed to ask; what the tokenisers make of texts is compared by itself. Numbers in single
precision are exact in JSON. The bounds are far beyond what export writes: with them a damaged or hostile file is refused before
anything is made of it.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from dragoman.export.fields import MAX_SAMPLES_BYTES, BundleError, Difference, Length, Line, TokenId, one_line
from dragoman.export.manifest import SAMPLES_FILE, Manifest
from dragoman.export.processor import Platform
from dragoman.model.files import read_given
from dragoman.model.text.tokenizers import Tokenizers

FORMAT: Literal[1] = 1
NUM_CANDIDATES = 4
"""Likeliest tokens that are told of each position, the answer's own first; fewer where a model has no more to choose from."""
MAX_SAMPLES, MAX_SOURCE_IDS, MAX_TARGET_IDS, MAX_PREFIX_IDS = 64, 4096, 512, 128
MAX_TEXT_CHARACTERS = 65536

LogProb = Annotated[float, Meta(ge=-1e9, le=1)]  # rounding may leave one a little above 0
Candidate = tuple[TokenId, LogProb]
Ids = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TARGET_IDS)]
Source = Annotated[list[TokenId], Meta(max_length=MAX_SOURCE_IDS)]
LogProbs = Annotated[list[LogProb], Meta(min_length=1, max_length=MAX_TARGET_IDS)]
Candidates = Annotated[list[Candidate], Meta(min_length=1, max_length=NUM_CANDIDATES)]


class Sample(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A source and the greedy answer to it."""

    source: Source  # ids, with what is said around a text, end-of-sequence included; of a prompt, all but the last
    ids: Ids  # generated tokens, end-of-sequence included where it came, the forced prefix not
    log_probs: LogProbs  # of each of them
    # For each of them the likeliest tokens at its position with their log-probabilities, in order, itself the first.
    candidates: Annotated[list[Candidates], Meta(min_length=1, max_length=MAX_TARGET_IDS)]
    target_prefix: Annotated[list[TokenId], Meta(max_length=MAX_PREFIX_IDS)] = []  # forced prefix
    decoder_start_id: TokenId | None = None  # first decoder token; None for the model's

    def __post_init__(self) -> None:
        """Refuse lists that do not belong together.

        Raises:
            ValueError: Naming the first position.
        """
        if not len(self.ids) == len(self.log_probs) == len(self.candidates):
            raise ValueError(f"{len(self.ids)} ids with {len(self.log_probs)} log_probs and {len(self.candidates)} candidates")
        for place, row in enumerate(zip(self.ids, self.log_probs, self.candidates, strict=True)):
            token, log_prob, candidates = row
            if candidates[0] != (token, log_prob):
                raise ValueError(f"the first of candidates at position {place} is not the answer's token")
            if any(before[1] < after[1] for before, after in pairwise(candidates)):
                raise ValueError(f"candidates at position {place} are not in order")


class ScoredSample(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A source and a target that were scored."""

    source: Source  # see `Sample`
    target: Ids  # ids, end-of-sequence included
    log_probs: LogProbs  # of each of them
    decoder_start_id: TokenId | None = None  # see `Sample`

    def __post_init__(self) -> None:
        """Refuse lists that do not belong together.

        Raises:
            ValueError: If they do not.
        """
        if len(self.target) != len(self.log_probs):
            raise ValueError(f"{len(self.target)} ids of a target with {len(self.log_probs)} log_probs")


class TextSample(Struct, frozen=True, forbid_unknown_fields=True):
    """A text and an answer, with their ids."""

    text: Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]  # that the source's tokeniser reads
    ids: Source  # as which it does, with nothing around them
    answer: Source  # ids of the target
    answer_text: Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]  # as which the target's tokeniser writes them


class Samples(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of `samples.json`."""

    format: Literal[1] = FORMAT  # of the file
    platform: Platform  # Platform of the answers, on which the same bits must be reproduced.
    device: Line  # runtime, and graphs that did not run, see `Parity`
    tolerance: Difference  # tolerance of log-probabilities on another platform or device; see `answering`
    # Whether scores, too, have the same bits on the same platform. Those of a large bundle need not, for its scorer may have its
    # weights in another order.
    are_scores_exact: bool
    max_new_tokens: Length  # that the answers were allowed
    samples: Annotated[list[Sample], Meta(min_length=1, max_length=MAX_SAMPLES)]  # answers, to sources from short to long
    pairs: Annotated[list[ScoredSample], Meta(max_length=MAX_SAMPLES)]  # scores
    # Texts with their ids; absent in earlier bundles.
    texts: Annotated[list[TextSample], Meta(max_length=MAX_SAMPLES)] = []

    def check(self, manifest: Manifest) -> None:
        """Refuse what the model cannot be asked, or cannot have answered.

        Raises:
            ValueError: Naming the sample.
        """
        for number, sample in enumerate(self.samples, 1):
            name, num_new = f"sample {number}", len(sample.ids)
            tokens = [*sample.target_prefix, *sample.ids, *(token for row in sample.candidates for token, _ in row)]
            _check_sides(name, sample.source, tokens, sample.decoder_start_id, manifest)
            read = len(sample.source) * manifest.has_prompts
            _check_length(name, "answer", read + len(sample.target_prefix) + self.max_new_tokens, manifest.max_target_tokens)
            if num_new > self.max_new_tokens or (num_new < self.max_new_tokens and sample.ids[-1] != manifest.eos_id):
                raise ValueError(f"{name} has {num_new} tokens, where {self.max_new_tokens} were allowed")
            if manifest.eos_id in sample.ids[:-1]:
                raise ValueError(f"{name} goes on after end-of-sequence")
        for number, pair in enumerate(self.pairs, 1):
            name = f"pair {number}"
            _check_sides(name, pair.source, pair.target, pair.decoder_start_id, manifest)
            read = len(pair.source) * manifest.has_prompts
            _check_length(name, "target", read + len(pair.target), manifest.max_target_tokens)

    def check_texts(self, tokenizers: Tokenizers) -> None:
        """Refuse tokenisers that are not those of export.

        Raises:
            ValueError: Naming the text.
        """
        for number, sample in enumerate(self.texts, 1):
            if tokenizers.source.encode(sample.text) != sample.ids:
                raise ValueError(f"text {number} is read as other tokens than at export")
            if tokenizers.target.decode(sample.answer) != sample.answer_text:
                raise ValueError(f"answer {number} is written as another text than at export")


def _check_sides(name: str, source: list[int], target: list[int], start: int | None, manifest: Manifest) -> None:
    """Refuse ids that the model does not have, and a source that is too long."""
    _check_length(name, "source", len(source), manifest.max_source_tokens)
    if not source and not manifest.has_prompts:
        raise ValueError(f"the source of {name} has no token, and the model takes 1 at least")
    target = target if start is None else [*target, start]
    for side, ids, size in (("source", source, manifest.source_vocab_size), ("target", target, manifest.target_vocab_size)):
        if (largest := max(ids, default=0)) >= size:
            raise ValueError(f"the {side} of {name} has token {largest}, which is outside the vocabulary of {size}")


def _check_length(name: str, what: str, length: int, limit: int) -> None:
    if length > limit:
        raise ValueError(f"the {what} of {name} has {length} tokens, and the model takes {limit}")


def read_samples(directory: Path, manifest: Manifest) -> Samples | None:
    """Read a bundle's sample answers; None where it has none.

    Args:
        directory: Of the bundle, whose files have been compared with the manifest.
        manifest: Its manifest.

    Raises:
        BundleError: If they cannot be read, or are none; it names what is wrong.
    """
    if SAMPLES_FILE not in manifest.files:
        return None
    path = directory / SAMPLES_FILE
    content = read_given(path, MAX_SAMPLES_BYTES, BundleError)
    try:
        samples = msgspec.json.decode(content, type=Samples)
        samples.check(manifest)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not sample answers: {one_line(str(error))}") from error
    return samples
