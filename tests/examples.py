"""Number of generated examples of a test: enough to find most defects, or all of them, which takes minutes."""

import os


def num_examples(default: int, *, of: int) -> int:
    """Return the smaller number, or the whole one with `TEST_LONG`."""
    return of if os.environ.get("TEST_LONG") else default
