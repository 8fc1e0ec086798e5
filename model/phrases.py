"""Alignment of words and phrases of sentence pairs (Koehn et al., 2003, Statistical Phrase-Based Translation).

The links between words come from a word aligner, eflomal (Östling and Tiedemann, 2016), which is a program of its own.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dragoman.model.corpus import DataError, read_lines, write_lines
from dragoman.model.errors import InputError

# A French elision (l', qu'), a word with its hyphens and apostrophes, or a sign.
WORD = re.compile(r"(?i:[cdjlmnst]|qu)['’](?=\w)|\w+(?:['’-]\w+)*|[^\w\s]")
MAX_SOURCE_WORDS, MAX_TARGET_WORDS = 6, 7

Links = set[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Words:
    """A sentence and where its words are."""

    text: str  # the sentence
    spans: list[tuple[int, int]]  # start and end of each word in `text`, in characters
    lower: list[str]  # the words in lower case

    @classmethod
    def of(cls, text: str) -> "Words":
        """Find the words of a sentence; white space belongs to none."""
        spans = [match.span() for match in WORD.finditer(text)]
        return cls(text, spans, [text[start:end].lower() for start, end in spans])

    def cut(self, phrase: range) -> str:
        """Return the text from a phrase's first word to its last."""
        return self.text[self.spans[phrase[0]][0] : self.spans[phrase[-1]][1]]


@dataclass(frozen=True, slots=True)
class Phrase:
    """A phrase of a sentence and its translation, as indices of their words."""

    source: range
    target: range


@dataclass(frozen=True, slots=True)
class AlignedPair:
    """A sentence pair with the links between its words."""

    source: Words  # the source's words
    target: Words  # the target's words
    sure: Links  # links that both directions of the aligner found: pairs of a source and a target index
    possible: Links  # links that either found

    def phrases(self) -> Iterator[Phrase]:
        """Yield the consistent phrase pairs: no word of either is linked to one outside, and a sure link ends both.

        Phrases have at most six words in the source and seven in the target.
        """
        linked_targets, linked_sources = _by_end(self.possible)
        sure_sources, sure_targets = ({link[side] for link in self.sure} for side in (0, 1))
        count = len(self.source.lower)
        for start in range(count):
            reached: set[int] = set()
            for last in range(start, min(start + MAX_SOURCE_WORDS, count)):
                reached |= linked_targets.get(last, set())
                if not reached:
                    continue
                target = range(min(reached), max(reached) + 1)
                if len(target) > MAX_TARGET_WORDS:
                    break
                back = {source for word in target for source in linked_sources.get(word, ())}
                if start <= min(back) and max(back) <= last and last in sure_sources and target[-1] in sure_targets:
                    yield Phrase(range(start, last + 1), target)


def align(sources: Sequence[str], targets: Sequence[str], aligner: str) -> list[AlignedPair]:
    """Split a parallel text into words and link them; eflomal draws at random, so that another call may link some otherwise.

    Args:
        sources: One sentence each, not blank.
        targets: Their translations.
        aligner: The program `eflomal-align`: its path, or a name that is looked up beside this Python and in PATH.

    Raises:
        InputError: If the program is absent or fails, or if what it wrote does not fit the text.
    """
    program = shutil.which(aligner, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if program is None:
        raise InputError(f"{aligner}: no such program; `pip install eflomal` brings eflomal-align")
    words = [[Words.of(text) for text in side] for side in (sources, targets)]
    with tempfile.TemporaryDirectory() as directory:
        texts = [Path(directory, name) for name in ("source", "target")]
        links = [Path(directory, name) for name in ("forward", "reverse")]
        for path, side in zip(texts, words, strict=True):
            write_lines(path, (" ".join(sentence.lower) for sentence in side))
        options = zip("stfr", [*texts, *links], strict=True)
        command = [program, *(argument for letter, path in options for argument in (f"-{letter}", str(path)))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise InputError(f"{aligner}: {error.strerror}") from error
        if done.returncode:
            *_, last = done.stderr.strip().splitlines() or ["it does not say why"]
            raise InputError(f"{aligner} failed with {done.returncode}: {last}")
        if not all(path.exists() for path in links):
            raise InputError(f"{aligner} wrote no links")
        pairs = list(zip(*words, strict=True))
        forward, reverse = (_read_links(path, pairs) for path in links)
    return [
        AlignedPair(source, target, one & other, one | other)
        for (source, target), one, other in zip(pairs, forward, reverse, strict=True)
    ]


def _read_links(path: Path, pairs: Sequence[tuple[Words, Words]]) -> list[Links]:
    """Read a file of links as word aligners write them, `0-0 1-2` a line; the line of a pair without links is empty."""
    lines = read_lines(path)
    if len(lines) != len(pairs):
        raise DataError(f"the aligner's {path.name} links: {len(lines)} lines for {len(pairs)} sentences")
    links: list[Links] = []
    for number, (line, (source, target)) in enumerate(zip(lines, pairs, strict=True), start=1):
        links.append(set())
        for link in line.split():
            match = re.fullmatch(r"(\d+)-(\d+)", link)
            if not match:
                raise DataError(f"the aligner's {path.name} links, line {number}: {link!r} is not a link")
            i, j = map(int, match.groups())
            if i >= len(source.lower) or j >= len(target.lower):
                raise DataError(f"the aligner's {path.name} links, line {number}: {link} names a word that the line does not have")
            links[-1].add((i, j))
    return links


def _by_end(links: Iterable[tuple[int, int]]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Return the linked targets of each source and the linked sources of each target."""
    targets: dict[int, set[int]] = {}
    sources: dict[int, set[int]] = {}
    for source, target in links:
        targets.setdefault(source, set()).add(target)
        sources.setdefault(target, set()).add(source)
    return targets, sources
