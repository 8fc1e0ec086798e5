"""What the registry says, written out for whoever scrapes: one at a time, a few may wait, and only a part of the time at all."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import structlog

from dragoman.server.telemetry.admin_request import AdminAnswer, AdminRequest

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

MAX_WAITING = 8
# Writing the metrics out takes the interpreter from the requests that are served, so after each time it rests this much longer.
REST = 4.0
MAX_REST_SECONDS = 1.0

log = structlog.get_logger("dragoman.admin")


class Scrapes:
    """Runs the application that answers /metrics, on a thread of its own. All but the thread belongs to one event loop."""

    def __init__(self, metrics_app: "WSGIApplication") -> None:
        """Answer with this."""
        self._app = metrics_app
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="admin-scrape")
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._next_at = 0.0

    async def answer(self, request: AdminRequest) -> AdminAnswer:
        """Return the metrics, or why there are none now."""
        if self._num_waiting >= MAX_WAITING:
            text = "too many scrapes are waiting"
            return AdminAnswer.text(HTTPStatus.SERVICE_UNAVAILABLE, text, ("Retry-After", "1"))
        self._num_waiting += 1
        try:
            async with self._turn:
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self._next_at - loop.time())
                started = loop.time()
                try:
                    # Where this is cancelled the thread goes on, and whoever comes next waits for it all the same.
                    return await loop.run_in_executor(self._thread, self._run, request)
                except Exception:
                    log.exception("metrics cannot be written out")
                    return AdminAnswer.text(HTTPStatus.INTERNAL_SERVER_ERROR, "metrics cannot be written out; the log says why")
                finally:
                    self._next_at = loop.time() + min(REST * (loop.time() - started), MAX_REST_SECONDS)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, request: AdminRequest) -> AdminAnswer:
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query,
            "HTTP_ACCEPT": request.headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }
        said: list[Any] = []
        body = b"".join(self._app(environ, lambda *what: said.extend(what)))  # type: ignore[arg-type]
        status, headers = said[:2]
        return AdminAnswer(HTTPStatus(int(status.split(" ")[0])), body, tuple(headers))
