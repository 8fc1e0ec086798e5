"""LitServe before CTranslate2: FastAPI, and a process for each instance."""

from typing import Any

from litserve import LitAPI, LitServer

from benchmarks.peers.translator import Translator, parse_arguments


class Translation(LitAPI):  # type: ignore[misc]
    """One instance."""

    def setup(self, device: str) -> None:
        """Load the model."""
        arguments = parse_arguments(__doc__)
        parts, threads = arguments.parts, arguments.threads
        self._translator = Translator(arguments.model, arguments.precision, parts, threads, parts)

    def decode_request(self, request: dict[str, str]) -> str:
        """Return the text of a request."""
        return request["text"]

    def predict(self, texts: list[str]) -> list[str]:
        """Translate a batch."""
        return self._translator.translate(texts)

    def encode_response(self, output: str) -> dict[str, Any]:
        """Return the answer to a request."""
        return {"text": output}


def main() -> None:
    """Serve until SIGTERM."""
    arguments = parse_arguments(__doc__)
    api = Translation(max_batch_size=arguments.max_batch_size, batch_timeout=arguments.delay_ms / 1000)
    server = LitServer(api, accelerator="cpu", workers_per_device=arguments.instances, timeout=False, fast_queue=True)
    server.run(
        host="127.0.0.1", port=arguments.port, num_api_servers=1, log_level="warning", generate_client_file=False, access_log=False
    )


if __name__ == "__main__":
    main()
