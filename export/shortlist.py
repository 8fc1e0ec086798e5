"""Which tokens a model with a shortlist chooses from: those of a text, and what any other text can be said with.

A step of a model with a large vocabulary spends most of its time on tokens that a language never uses. A list that is fixed at
export is exact for what it holds, and the same whatever else is in the batch. It imports neither torch nor ONNX.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from dragoman.export.arguments import ExportError
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Languages, Template
from dragoman.model.text.tokenizer import Tokenizer

BATCH_LINES = 1024


def choose_shortlist(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: Template,
    languages: Languages | None,
    size: int | None = None,
) -> list[int]:
    """Return the ids of a shortlist, rising.

    They are the tokens of the texts; end-of-sequence and padding; what template and languages force answers to begin with; and
    every token that is a single byte or character, the unknown one included, so that whatever can be said at all still can.

    Args:
        texts: In the target language.
        tokenizer: Of the target.
        config: Of the model.
        template: What is said to it around every text.
        languages: Those it knows, if any.
        size: Keep so many tokens of the texts, the most frequent; of equals the lower id. By default all.

    Raises:
        ExportError: If the texts hold nothing.
    """
    counts = _count(texts, tokenizer)
    if not counts:
        raise ExportError("the shortlist's text is empty")
    kept = sorted(counts, key=lambda i: (-counts[i], i))[:size]
    return sorted({*kept, *needed_ids(tokenizer, config, template, languages)})


def needed_ids(tokenizer: Tokenizer, config: ModelConfig, template: Template, languages: Languages | None) -> set[int]:
    """Return the ids that every shortlist of a model holds."""
    forced = set(template.target_prefix).union(*(language.target_prefix for language in (languages.target if languages else ())))
    elements = {i for i in range(tokenizer.vocab_size) if _is_element(tokenizer.token_bytes(i))}
    return {config.eos_id, config.pad_id, *forced, *elements}


def _is_element(content: bytes) -> bool:
    """Tell whether a token is one byte or one character, spaces aside; special tokens, which say nothing, are not."""
    stripped = content.strip(b" ")
    return bool(content) and (len(stripped) <= 1 or len(stripped.decode("utf-8", "replace")) == 1)


def _count(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[int]:
    counts: Counter[int] = Counter()
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH_LINES:
            _add(counts, batch, tokenizer)
            batch = []
    _add(counts, batch, tokenizer)
    return counts


def _add(counts: Counter[int], texts: Sequence[str], tokenizer: Tokenizer) -> None:
    for ids in tokenizer.encode_batch(texts):
        counts.update(ids)
