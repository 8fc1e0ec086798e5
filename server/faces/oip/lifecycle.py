"""Loading and unloading of models, an extension of Triton's: what an operator's message asks for, over gRPC and over HTTP."""

from collections.abc import Iterable

from dragoman.server.core.administration import Order
from dragoman.server.errors import InvalidRequest

# What unloading may say beside the model: no model depends on another, so either is done.
UNLOAD_DEPENDENTS = "unload_dependents"


def load_order(model: str, repository: str, parameters: Iterable[str]) -> Order:
    """Return the order to serve a model as its policy has it.

    Args:
        model: Its name.
        repository: Where it lies, as the message says; empty for the one that there is.
        parameters: Names of those that came along.

    Raises:
        InvalidRequest: If it is to be loaded otherwise than it lies in its folder.
    """
    _check(repository, parameters, ())
    return Order("load", model)


def unload_order(model: str, repository: str, parameters: Iterable[str]) -> Order:
    """Return the order to serve a model no more. Arguments and errors as `load_order`."""
    _check(repository, parameters, (UNLOAD_DEPENDENTS,))
    return Order("unload", model)


def _check(repository: str, parameters: Iterable[str], known: tuple[str, ...]) -> None:
    if repository:
        raise InvalidRequest("repository_name", "there is one, which has no name")
    if set(parameters) - set(known):
        raise InvalidRequest("parameters", "a model is loaded as it lies in its folder, with the settings that it has there")
