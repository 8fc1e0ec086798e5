"""mosec before CTranslate2: a Rust front end, and a process for each instance."""

import sys

from mosec import Server, Worker

from benchmarks.peers.translator import Translator, parse_arguments

TIMEOUT_MS = 120_000
CAPACITY = 65_536


class Translation(Worker):  # type: ignore[misc]
    """One instance."""

    def __init__(self) -> None:
        """Load the model."""
        arguments = parse_arguments(__doc__)
        parts, threads = arguments.parts, arguments.threads
        self._translator = Translator(arguments.model, arguments.precision, parts, threads, parts)

    def forward(self, data: list[dict[str, str]]) -> list[dict[str, str]]:
        """Translate a batch of requests."""
        return [{"text": answer} for answer in self._translator.translate([request["text"] for request in data])]


def main() -> None:
    """Serve until SIGTERM; mosec reads its own flags from the command line, in this process and in its workers'."""
    arguments = parse_arguments(__doc__)
    sys.argv += ["--address", "127.0.0.1", "--log-level", "warning", "--timeout", str(TIMEOUT_MS), "--capacity", str(CAPACITY)]
    server = Server()
    server.append_worker(
        Translation,
        num=arguments.instances,
        max_batch_size=arguments.max_batch_size,
        max_wait_time=arguments.delay_ms,
    )
    server.run()


if __name__ == "__main__":
    main()
