"""One question about a server's health, as load balancers ask it: for probes that cannot ask gRPC themselves."""

from dragoman.client.errors import CallError, ModelNotFound
from dragoman.client.reach import in_one_line
from dragoman.client.sync import Client


def why_not_serving(client: Client, server: str, service: str, is_tls: bool) -> str:
    """Ask a server once whether a service serves; return why it does not, in one line, and nothing if it does.

    Args:
        client: Where to ask; one that does not try again.
        server: As the user named it.
        service: Name of grpc.health.v1: empty or `readiness`, `liveness`, or a model's name.
        is_tls: Whether TLS is spoken.
    """
    try:
        if client.is_ready(service):
            return ""
    except ModelNotFound:
        return f"{server}: no service {service!r}; there are liveness, readiness and the models by their names"
    except CallError as error:
        return in_one_line(error, server, is_tls)
    # It said no or said nothing: what it does with another question tells which.
    try:
        client.models()
    except CallError as error:
        reason = in_one_line(error, server, is_tls)
        if reason.startswith(f"{server}: "):
            return reason
    return f"{server}: {service or 'readiness'} is not serving, the server says"
