"""TLS over gRPC: whose certificate a client has shown."""

from dragoman.server.faces.grpc.interceptors import Context

# Kinds of names that say who a client is, by gRPC's keys; an address says only where somebody was.
_NAMES = ("peer_dns", "peer_uri", "peer_email")
_ALL_ALTERNATIVES = "x509_subject_alternative_name"
_COMMON_NAME = "x509_common_name"


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
