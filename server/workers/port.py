"""The port that frontend workers share: bound by the parent, which never accepts connections.

Workers bind it with SO_REUSEPORT, which the kernel allows to all processes of one user. So that two servers started on one port by
mistake do not share connections, the parent binds it without that option and sets the option afterwards: workers may join, and
other programs are rejected even while no worker runs.
"""

import errno
import socket

from dragoman.server.listening import addresses_of, cannot_listen

# Address missing on this machine, such as ::1 without IPv6; another address of the host may exist.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class BoundPort:
    """A port that is bound until it is closed."""

    def __init__(self, host: str, port: int, setting: str = "port") -> None:
        """Bind the port (0 for any free one) at every address of the host; raise `ConfigError` naming `setting` if that fails."""
        self.port = port
        self._sockets: list[socket.socket] = []
        try:
            addresses = addresses_of(host, port)
        except (OSError, UnicodeError) as error:  # the second for a name that IDNA cannot encode
            raise cannot_listen(setting, host, port, error) from error
        failure: OSError | None = None
        for family, address in addresses:
            try:
                self._sockets.append(_take(family, (address[0], self.port, *address[2:])))
            except OSError as error:
                failure = error
                if error.errno not in _NOT_HERE:
                    self.close()
                    raise cannot_listen(setting, host, port, error) from error
            else:
                self.port = self._sockets[-1].getsockname()[1]
        if not self._sockets:
            raise cannot_listen(setting, host, port, failure) from failure

    def close(self) -> None:
        """Release the port; idempotent."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()


def _take(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    """Return a socket bound to a free address, which workers may bind too."""
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        is_chosen = address[1] != 0
        if is_chosen:  # allow the port of a server that has just ended
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        if is_chosen:  # several processes can bind a port with SO_REUSEADDR, but only one can listen
            held.listen()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        if is_chosen:
            held.shutdown(socket.SHUT_RDWR)  # keeps the port, accepts no connections
    except OSError:
        held.close()
        raise
    return held
