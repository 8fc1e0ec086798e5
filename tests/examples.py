"""How many generated examples a test tries: enough to find what is broken often, or all, which takes minutes."""

import os


def num_examples(default: int, *, of: int) -> int:
    """Return the smaller number, or the whole one with `TEST_LONG`."""
    return of if os.environ.get("TEST_LONG") else default
