"""More text for rare words: phrases that hold one, put into other sentences (after Fadaee et al., 2017) and by themselves.

A word that was seen two or three times is spelled out of pieces and comes out wrong, though its translation stands in the text.
Here it is seen in many sentences. These need not make sense, but mostly they are grammatical: a noun phrase takes the place of
another one whose translation has the same determiner, so that number and gender mostly agree.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from dragoman.model.errors import InputError
from dragoman.model.phrases import AlignedPair, Phrase, Words

DETERMINERS = {
    "de": "ein eine einen einem einer der die das den dem zwei drei vier fünf sechs mehrere einige "
    "sein seine seinen seinem seiner ihr ihre ihren ihrem ihrer",
    "en": "a an the one two three four five six several some many his her their its another",
    "fr": "un une le la l' l’ les des deux trois quatre cinq six plusieurs son sa ses leur leurs",
}
FREQUENT = 1 / 30  # of the sentences: more frequent words end no noun phrase, and one of them follows it
RARE = 100  # occurrences up to which a word draws the phrases that hold it into sentences
VERY_RARE = 20  # and into the text by themselves
MAX_PHRASE_WORDS = 3
EVERYWHERE = 1 / 10  # of the sentences: more frequent words may lack a link
COMMON_WEIGHT = 1e-3  # of a phrase without a rare word
TWO = 0.4  # chance that a sentence with two noun phrases or more has two of them replaced

SIGN = re.compile(r"[^\w\s]")


def determiners_of(language: str) -> Set[str]:
    """Return the words that begin a language's noun phrases, in lower case.

    Raises:
        InputError: If they are not known.
    """
    if language not in DETERMINERS:
        raise InputError(f"no determiners are known of {language!r}, only of {', '.join(DETERMINERS)}")
    return set(DETERMINERS[language].split())


class Augmenter:
    """An aligned text from which more is made."""

    def __init__(self, pairs: Sequence[AlignedPair], determiners: tuple[Set[str], Set[str]], seed: int) -> None:
        """Find noun phrases and short phrases.

        Args:
            pairs: The text.
            determiners: Of the source's and the target's language, in lower case, see `determiners_of`.
            seed: Of what is drawn.
        """
        self.pairs = pairs
        self.rng = random.Random(seed)
        self.determiners = determiners
        sides = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
        self.counts = [Counter(word for words in side for word in words.lower) for side in sides]
        self.frequent = [{word for word, count in counts.items() if count > FREQUENT * len(pairs)} for counts in self.counts]
        phrases = [self._linked_phrases(pair) for pair in pairs]
        self.noun_phrases = [self._noun_phrases(pair, found) for pair, found in zip(pairs, phrases, strict=True)]
        self.short_phrases = self._short_phrases(phrases)
        self.fillers = self._fillers()

    def substituted(self, copies: int) -> list[tuple[str, str]]:
        """Return every sentence with a noun phrase `copies` times, each time with one or two of them replaced."""
        return [self._substitute(i) for _ in range(copies) for i, found in enumerate(self.noun_phrases) if found]

    def short(self, most: int) -> list[tuple[str, str]]:
        """Return short phrases around very rare source words, the shortest `most` of each word."""
        seen: Counter[str] = Counter()
        chosen = []
        for (source, target), rare in self.short_phrases:
            if min(seen[word] for word in rare) < most:
                chosen.append((source, target))
                seen.update(rare)
        return chosen

    def _linked_phrases(self, pair: AlignedPair) -> list[Phrase]:
        """Return the phrases without signs of which every word that means something is linked."""
        linked: tuple[set[int], ...] = tuple({link[side] for link in pair.possible} for side in (0, 1))
        limit = EVERYWHERE * len(self.pairs)
        usable = [
            [not SIGN.fullmatch(word) and (i in linked[side] or counts[word] > limit) for i, word in enumerate(words)]
            for side, (words, counts) in enumerate(zip((pair.source.lower, pair.target.lower), self.counts, strict=True))
        ]
        return [
            phrase
            for phrase in pair.phrases()
            if all(usable[0][i] for i in phrase.source) and all(usable[1][i] for i in phrase.target)
        ]

    def _noun_phrases(self, pair: AlignedPair, phrases: Iterable[Phrase]) -> list[Phrase]:
        """Return noun phrases that begin with a determiner on both sides, the longest of each beginning, none within another."""
        longest: dict[int, Phrase] = {}
        linked_targets = {target for _, target in pair.possible}
        for phrase in phrases:
            source, target = phrase.source, phrase.target
            before = target[0] - 1
            if before >= 0 and before not in linked_targets and pair.target.lower[before] in self.determiners[1]:
                target = range(before, target.stop)  # the aligner often leaves an article alone
            if self._is_noun_phrase(pair.source, source, 0) and self._is_noun_phrase(pair.target, target, 1):
                longest[source[0]] = Phrase(source, target)  # of one beginning the longest comes last
        found: list[Phrase] = []
        for phrase in longest.values():
            if not any(_overlap(phrase.source, other.source) or _overlap(phrase.target, other.target) for other in found):
                found.append(phrase)
        return found

    def _is_noun_phrase(self, words: Words, phrase: range, side: int) -> bool:
        """Tell whether a phrase begins with its only determiner and is whole: a frequent word, a sign or nothing follows."""
        determiners, frequent = self.determiners[side], self.frequent[side]
        first, *rest = (words.lower[i] for i in phrase)
        after = words.lower[phrase.stop] if phrase.stop < len(words.lower) else "."
        return (
            first in determiners
            and bool(rest)
            and determiners.isdisjoint(rest)
            and (side == 1 or rest[-1] not in frequent)
            and (after in frequent or SIGN.fullmatch(after) is not None)
        )

    def _fillers(self) -> dict[str, "_Fillers"]:
        """Return the noun phrases of the whole text, by the target's determiner."""
        texts: dict[str, dict[tuple[str, str], set[str]]] = defaultdict(dict)
        for pair, found in zip(self.pairs, self.noun_phrases, strict=True):
            for phrase in found:
                text = uncapitalised(pair.source.cut(phrase.source)), uncapitalised(pair.target.cut(phrase.target))
                texts[pair.target.lower[phrase.target[0]]].setdefault(text, self._rare_words(pair, phrase, RARE))
        return {determiner: _Fillers.of(phrases) for determiner, phrases in texts.items()}

    def _rare_words(self, pair: AlignedPair, phrase: Phrase, most: int) -> set[str]:
        """Return the words of a phrase's source that come `most` times or less in all sources."""
        return {word for word in (pair.source.lower[i] for i in phrase.source) if self.counts[0][word] <= most}

    def _substitute(self, index: int) -> tuple[str, str]:
        """Return a sentence with one or two of its noun phrases replaced."""
        pair, found = self.pairs[index], self.noun_phrases[index]
        chosen = self.rng.sample(found, 2 if len(found) > 1 and self.rng.random() < TWO else 1)
        fillers = [self.fillers[pair.target.lower[phrase.target[0]]].draw(self.rng) for phrase in chosen]
        source = replaced(pair.source, [(phrase.source, filler[0]) for phrase, filler in zip(chosen, fillers, strict=True)])
        target = replaced(pair.target, [(phrase.target, filler[1]) for phrase, filler in zip(chosen, fillers, strict=True)])
        return source, target

    def _short_phrases(self, phrases: Sequence[Sequence[Phrase]]) -> list[tuple[tuple[str, str], set[str]]]:
        """Return phrases with a very rare source word, shortest first, each once, with these words."""
        texts: dict[tuple[str, str], set[str]] = {}
        for pair, found in zip(self.pairs, phrases, strict=True):
            begins = [{link[side] for link in pair.sure} for side in (0, 1)]
            for phrase in found:
                rare = self._rare_words(pair, phrase, VERY_RARE)
                is_sure = phrase.source[0] in begins[0] and phrase.target[0] in begins[1]
                if rare and is_sure and len(phrase.source) <= MAX_PHRASE_WORDS:
                    texts.setdefault((pair.source.cut(phrase.source), pair.target.cut(phrase.target)), rare)
        order = list(texts.items())
        self.rng.shuffle(order)
        return sorted(order, key=lambda item: len(item[0][0].split()))


@dataclass(frozen=True, slots=True)
class _Fillers:
    """Phrases to draw from, by weights that give each rare word about the same chance, however many phrases hold it."""

    texts: list[tuple[str, str]]
    cumulative_weights: list[float]

    @classmethod
    def of(cls, phrases: dict[tuple[str, str], set[str]]) -> "_Fillers":
        """Weigh phrases by their rare words."""
        counts = Counter(word for rare in phrases.values() for word in rare)
        weights = (COMMON_WEIGHT + sum(1 / counts[word] for word in rare) for rare in phrases.values())
        return cls(list(phrases), list(accumulate(weights)))

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Return a phrase and its translation."""
        return rng.choices(self.texts, cum_weights=self.cumulative_weights)[0]


def replaced(words: Words, replacements: Sequence[tuple[range, str]]) -> str:
    """Put other text in the place of phrases that do not overlap; a sentence goes on beginning with a capital letter."""
    text = words.text
    for phrase, filler in sorted(replacements, key=lambda replacement: replacement[0][0], reverse=True):
        start, end = words.spans[phrase[0]][0], words.spans[phrase[-1]][1]
        is_capital = phrase[0] == 0 and text[start].isupper()
        text = text[:start] + (filler[0].upper() + filler[1:] if is_capital else filler) + text[end:]
    return text


def uncapitalised(text: str) -> str:
    """Return a phrase as it stands inside a sentence; it begins with a determiner, which is no name."""
    return text[0].lower() + text[1:]


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
