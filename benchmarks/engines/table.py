"""Name of a checkout's commit, for scenarios that import it from here."""

from benchmarks.harness.page import commit

__all__ = ["commit"]
