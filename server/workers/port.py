"""The port that frontend workers share: bound by the parent and never listened on.

Workers bind it with SO_REUSEPORT, which the kernel allows to all processes of one user. Two servers started on one port by mistake
must not share its connections, so the parent binds it without that option first, as any other server does, and sets the option
afterwards: then workers may join, and other programs are refused, also while no worker runs.
"""

import errno
import socket
from types import TracebackType
from typing import Self

from dragoman.server.listening import addresses_of, cannot_listen

# The machine does not have the address, such as ::1 without IPv6; another one of the host may do.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class HeldPort:
    """A bound port; a context manager.

    Attributes:
        port: Its number.
    """

    def __init__(self, host: str, port: int, setting: str = "port") -> None:
        """Bind the port, at every address that the host stands for.

        Args:
            host: Name or address.
            port: 0 for any that is free.
            setting: Name of the port in errors.

        Raises:
            ConfigError: If it is taken, or there is no such address.
        """
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

    def __enter__(self) -> Self:
        """Return the port."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release the port."""
        self.close()


def _take(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    """Return a socket bound to a free address, which workers may bind too."""
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        is_chosen = address[1] != 0
        if is_chosen:  # connections of a server that has just ended are no reason to wait
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        if is_chosen:  # two processes can bind it with that option, only one can listen
            held.listen()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        if is_chosen:
            held.shutdown(socket.SHUT_RDWR)  # keeps the port, accepts no connections
    except OSError:
        held.close()
        raise
    return held
