"""Which words of a source and a target belong together, worked out from the attention between their tokens.

Words are the runs of characters between white space, what `str.split` of Python gives; punctuation belongs to the word it touches.
A token belongs to the word that its first character which is not white space lies in; a token of nothing but white space, and those
that stand for no text, such as end-of-sequence and languages, belong to none.

Each target word j is linked to one source word: the i for which the attention, summed over the rows of j's tokens and the columns
of i's tokens, is the largest; of equals the first. Row t of the attention is that of the step which says target token t. A source
word may have any number of links. Weights on tokens that belong to no word do not count.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def token_words(pieces: Sequence[bytes]) -> list[int | None]:
    """Return the word of each token, from 0, None for a token that belongs to none.

    Args:
        pieces: What the tokens stand for; together the text, though each may end inside a character.
    """
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    word_of_byte: list[int | None] = []
    word, is_inside = -1, False
    for character in text:
        is_space = character.isspace()
        word += not (is_space or is_inside)
        is_inside = not is_space
        word_of_byte += [None if is_space else word] * len(character.encode("utf-8", "surrogateescape"))
    words: list[int | None] = []
    start = 0
    for piece in pieces:
        inside = (found for found in word_of_byte[start : start + len(piece)] if found is not None)
        words.append(next(inside, None))
        start += len(piece)
    return words


def word_alignment(
    attention: NDArray[np.float32], source_pieces: Sequence[bytes], target_pieces: Sequence[bytes], task: str = ""
) -> str:
    """Return the links `i-j` of source word i and target word j, sorted, with spaces between: Pharaoh's format.

    Args:
        attention: `[T, S]`.
        source_pieces: Bytes of each source token, S of them.
        target_pieces: Bytes of each target token, T of them.
        task: What comes before the source's own text and is tokenised with it; its words are not counted and have no links.
    """
    num_before = _num_words_before(task)
    sources = [None if word is None or word < num_before else word - num_before for word in token_words(source_pieces)]
    rows, columns = _membership(token_words(target_pieces)), _membership(sources)
    mass = rows @ attention.astype(np.float64) @ columns.T  # [target words, source words]
    if not mass.size:
        return ""
    links = sorted((int(i), j) for j, i in enumerate(mass.argmax(1)))
    return " ".join(f"{i}-{j}" for i, j in links)


def _num_words_before(task: str) -> int:
    """Return how many words end within a task; the last of one that does not end in white space goes on in the text."""
    words = task.split()
    return len(words) - (bool(words) and not task[-1].isspace())


def _membership(words: Sequence[int | None]) -> NDArray[np.float64]:
    """Return `[words, tokens]`, 1 where a token belongs to a word."""
    count = max((word for word in words if word is not None), default=-1) + 1
    table = np.zeros((count, len(words)))
    for token, word in enumerate(words):
        if word is not None:
            table[word, token] = 1
    return table
