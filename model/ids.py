"""What a text is to a model."""

from collections.abc import Sequence

Ids = Sequence[int]
