"""The port that all front ends share: held by the process that starts them, so that nobody else can have it, and never listened on.

Front ends bind it with SO_REUSEPORT, which the kernel allows to all processes of one user. Two servers started on one port by
mistake must not share its connections, so the port is taken without that option first, as any other server does, and the option
set afterwards: then front ends may join, and whoever does not ask for it is refused, also while no front end lives.
"""

import errno
import socket
from types import TracebackType
from typing import Self

from dragoman.server.addresses import addresses_of, cannot_listen

# Of an address that this machine does not have, such as ::1 where there is no IPv6; another one of the host may do.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class HeldPort:
    """A port that is ours until it is closed; a context manager.

    Attributes:
        port: Its number.
    """

    def __init__(self, host: str, port: int, setting: str = "port") -> None:
        """Take it, at every address that the host stands for.

        Args:
            host: Name or address.
            port: 0 for any that is free.
            setting: What the port is called in an error.

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
        """Give it up; doing so again does nothing."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give it up."""
        self.close()


def _take(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    """Return a socket that has an address, which nobody had, and lets others of ours have it, too."""
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        is_chosen = address[1] != 0
        if is_chosen:  # connections of a server that has just ended are no reason to wait
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        if is_chosen:  # two could have bound it with that option; only one can listen
            held.listen()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        if is_chosen:
            held.shutdown(socket.SHUT_RDWR)  # it keeps the port and takes no connections any more
    except OSError:
        held.close()
        raise
    return held
