"""One question about a server's health, as load balancers ask it: for probes that cannot ask gRPC themselves."""

from dragoman.client.certificates import Tls
from dragoman.client.sync import Client
from dragoman.model.errors import InputError


def is_serving(target: str, service: str, timeout_seconds: float, tls: Tls) -> bool:
    """Ask a server once whether a service serves; one that cannot be reached does not.

    Args:
        target: The server.
        service: Name of grpc.health.v1: empty or `readiness`, `liveness`, or a model's name.
        timeout_seconds: Time for the question.
        tls: How to speak to it.

    Raises:
        InputError: If a file or an argument cannot be used.
        CallError: If the server does not know the service, or does not answer in time.
    """
    try:
        client = Client(target, timeout_seconds=timeout_seconds, credentials=tls.credentials(), options=tls.options())
    except ValueError as error:
        raise InputError(str(error).replace("target", "--server", 1)) from error
    with client:
        return client.is_ready(service)
