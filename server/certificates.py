"""Dates of a certificate that a server shows, as a client sees them that meets it."""

import ssl

# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name: a date is to be read whatever it is.
_NO_CHECK_TIME = 0x200000


def read_dates(context: ssl.SSLContext, certificate: bytes) -> tuple[float, float]:
    """Return from when to when a certificate is valid, in seconds since 1970, as a client that meets it sees it.

    Args:
        context: A server's that shows the certificate.
        certificate: PEM.

    Raises:
        ssl.SSLError: If no client could accept the certificate, whomever it trusts.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    client.load_verify_locations(cadata=text_of(certificate))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = context.wrap_bio(to_server, to_client, server_side=True)
    while not _is_done(asking):
        _is_done(answering)
    shown = asking.getpeercert()
    assert shown
    return ssl.cert_time_to_seconds(str(shown["notBefore"])), ssl.cert_time_to_seconds(str(shown["notAfter"]))


def _is_done(end: ssl.SSLObject) -> bool:
    """Go on with a handshake; return whether this end has finished, or waits for the other."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def text_of(certificates: bytes) -> str:
    """Return certificates as text, without what others have written between them in letters of their own."""
    return certificates.decode("ascii", errors="ignore")
