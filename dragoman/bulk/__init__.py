"""Translation of batches and files without a server."""

from dragoman.bulk.translator import Columns, Outcome, Translator

__all__ = ["Columns", "Outcome", "Translator"]
