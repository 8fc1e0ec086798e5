"""Texts of mixed lengths."""

from collections import Counter

import pytest

from benchmarks.harness.mixture import SHARES, mix

CAPTIONS = [f"caption{i}" for i in range(50)]


def test_texts_are_captions_joined_as_often_as_is_said() -> None:
    texts = mix(CAPTIONS, 4000, seed=3)
    assert {word for text in texts for word in text.split(" ")} == set(CAPTIONS)
    counts = Counter(len(text.split(" ")) for text in texts)
    assert counts.keys() == SHARES.keys()
    for size, share in SHARES.items():
        assert counts[size] / len(texts) == pytest.approx(share, abs=0.04)


def test_texts_repeat_with_their_seed_only() -> None:
    assert mix(CAPTIONS, 20, 1) == mix(CAPTIONS, 20, 1) != mix(CAPTIONS, 20, 2)
