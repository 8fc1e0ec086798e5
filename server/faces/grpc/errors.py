"""Errors on the wire: the one place where they become gRPC statuses."""

import grpc
from grpc_status import rpc_status

from dragoman.server.errors import ServiceError
from dragoman.server.faces.v1.status import to_message


def to_status(error: ServiceError, request_id: str = "") -> grpc.Status:
    """Return the gRPC status of an error, with what `to_message` has in its details."""
    result: grpc.Status = rpc_status.to_status(to_message(error, request_id))
    return result
