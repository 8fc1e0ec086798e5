"""TLS over gRPC: the server's files as gRPC takes them, and whose certificate a client has shown."""

import grpc

from dragoman.server.faces.grpc.interceptors import Context
from dragoman.server.faces.tls_files import Contents, TlsFiles

# Kinds of names that say who a client is, by gRPC's keys; an address says only where somebody was.
_NAMES = ("peer_dns", "peer_uri", "peer_email")
_ALL_ALTERNATIVES = "x509_subject_alternative_name"
_COMMON_NAME = "x509_common_name"


def credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials for a port, which follow every later `reload` of the files."""
    seen = files.contents

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return what is new since the last time, if anything is; gRPC asks at each handshake, on a thread of its own."""
        nonlocal seen
        if seen is files.contents:
            return None
        seen = files.contents
        return _configuration(seen)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(seen),
        fetch,  # type: ignore[arg-type]  # its stub does not know that None stands for nothing new
        require_client_authentication=seen.client_ca is not None,
    )


def peer_names(context: Context) -> tuple[str, ...]:
    """Return the names in the certificate that the client has shown and the server has verified, as they are written there.

    Args:
        context: Of the RPC.

    Returns:
        Its subject alternative names: DNS names, URIs, then e-mail addresses. The subject's common name only where it has no
        alternative names of any kind, addresses included. Empty without a certificate. Names that are not printable are left out.
    """
    shown = context.auth_context()
    keys = _NAMES if _ALL_ALTERNATIVES in shown else (_COMMON_NAME,)
    names = (value.decode(errors="replace") for key in keys for value in shown.get(key, ()))
    return tuple(name for name in names if name and name.isprintable() and "\N{REPLACEMENT CHARACTER}" not in name)


def _configuration(contents: Contents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.certificate)], contents.client_ca)
