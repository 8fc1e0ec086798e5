"""Dragoman: encoder-decoder Transformers, trained, exported, served and called. Here is what callers of a server use.

Example:
    from dragoman import Client

    with Client("localhost") as client:
        print(client.generate("A dog runs through the snow.", model="en-de").text)

Each name is loaded when it is first used, so `import dragoman` costs next to nothing. What is not listed in `__all__` is private,
in whatever module it lies.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dragoman.client.aio import AsyncClient
    from dragoman.client.aio_calls import AsyncStream
    from dragoman.client.batch import Outcome
    from dragoman.client.calls import Scope, Stream
    from dragoman.client.errors import (
        CallError,
        Cancelled,
        DeadlineExceeded,
        InternalError,
        InvalidArgument,
        ModelNotFound,
        Overloaded,
        PermissionDenied,
        TooLarge,
        Unauthenticated,
        Unavailable,
        Unimplemented,
    )
    from dragoman.client.model_info import Defaults, Language, ModelInfo, ModelVersion
    from dragoman.client.request import Request
    from dragoman.client.results import Alignment, Answer, FinishReason, Piece, Result, Score, Segment, Timings, TokenLogProb, Usage
    from dragoman.client.retry import RetryPolicy
    from dragoman.client.search import Search, SearchOptions, Term
    from dragoman.client.sync import Client
    from dragoman.model.errors import InputError

    __version__: str

__all__ = [
    "Alignment",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "CallError",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Defaults",
    "FinishReason",
    "InputError",
    "InternalError",
    "InvalidArgument",
    "Language",
    "ModelInfo",
    "ModelNotFound",
    "ModelVersion",
    "Outcome",
    "Overloaded",
    "PermissionDenied",
    "Piece",
    "Request",
    "Result",
    "RetryPolicy",
    "Scope",
    "Score",
    "Search",
    "SearchOptions",
    "Segment",
    "Stream",
    "Term",
    "Timings",
    "TokenLogProb",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "__version__",
]

# Module: the names that lie in it.
_HOMES = {
    "client.aio": ("AsyncClient",),
    "client.aio_calls": ("AsyncStream",),
    "client.batch": ("Outcome",),
    "client.calls": ("Scope", "Stream"),
    "client.errors": (
        "CallError",
        "Cancelled",
        "DeadlineExceeded",
        "InternalError",
        "InvalidArgument",
        "ModelNotFound",
        "Overloaded",
        "PermissionDenied",
        "TooLarge",
        "Unauthenticated",
        "Unavailable",
        "Unimplemented",
    ),
    "client.model_info": ("Defaults", "Language", "ModelInfo", "ModelVersion"),
    "client.request": ("Request",),
    "client.results": (
        "Alignment",
        "Answer",
        "FinishReason",
        "Piece",
        "Result",
        "Score",
        "Segment",
        "Timings",
        "TokenLogProb",
        "Usage",
    ),
    "client.retry": ("RetryPolicy",),
    "client.search": ("Search", "SearchOptions", "Term"),
    "client.sync": ("Client",),
    "model.errors": ("InputError",),
}

if not TYPE_CHECKING:  # hidden from type checkers, which see the names above

    def __getattr__(name):
        """Load a name of `__all__` (PEP 562)."""
        if name == "__version__":
            from importlib.metadata import version

            value = version("dragoman")
        else:
            home = next((module for module, names in _HOMES.items() if name in names), None)
            if home is None:
                raise AttributeError(f"module 'dragoman' has no attribute {name!r}")
            value = getattr(import_module(f"dragoman.{home}"), name)
        globals()[name] = value
        return value

    def __dir__():
        """Tell of what is not loaded yet too."""
        return sorted({*globals(), *__all__})
