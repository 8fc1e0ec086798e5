"""What wakes an engine's loop from another thread, while it sleeps on its socket."""

import os
import threading


class Bell:
    """A descriptor that is readable once somebody has rung, and until it is silenced; `ring` is for any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._descriptor

    def ring(self) -> None:
        """Wake whoever polls; without effect once it is closed."""
        with self._lock:  # or the number might be another file's by now
            if not self._is_closed:
                os.eventfd_write(self._descriptor, 1)

    def silence(self) -> None:
        """Forget that somebody has rung."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptor back; doing so again does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)
