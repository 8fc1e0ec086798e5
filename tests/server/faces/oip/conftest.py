"""The same server as for tests of gRPC's own face."""

from tests.server.faces.grpc.conftest import serve

__all__ = ["serve"]
