"""Who is at the other end of a connection over HTTP."""

from collections.abc import Sequence

from aiohttp import web

from dragoman.server.core.calls import Call

# Kinds of names that say who a client is, as Python's ssl has them; an address says only where somebody was.
_NAMES = ("DNS", "URI", "email")


def owner_of(call: Call, request: web.Request) -> str:
    """Return whose a request is, for what is shared out: its caller or, where callers are not known, its address."""
    return (request.remote or "") if call.caller is None else call.caller.name


def peer_names(request: web.Request) -> Sequence[str]:
    """Return the names in the certificate that the client has shown and the connection has verified.

    Returns:
        Its subject alternative names: DNS names, URIs, then e-mail addresses. The subject's common name only where it has no
        alternative names of any kind, addresses included. Empty without a certificate. Names that are not printable are left out.
    """
    shown = request.get_extra_info("peercert") or {}
    alternatives = shown.get("subjectAltName", ())
    if alternatives:
        names = [value for kind in _NAMES for own, value in alternatives if own == kind]
    else:
        names = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
    return tuple(name for name in names if name and name.isprintable() and "\N{REPLACEMENT CHARACTER}" not in name)
