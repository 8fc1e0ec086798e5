"""Triton's dynamic batcher before CTranslate2, set up by NVIDIA's own PyTriton."""

import logging

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.peers.translator import Translator, parse_arguments

MODEL = "translate"


def main() -> None:
    """Serve until SIGTERM."""
    arguments = parse_arguments(__doc__)
    logging.getLogger("pytriton").setLevel(logging.WARNING)
    num_workers = arguments.instances * arguments.parts
    translator = Translator(arguments.model, arguments.precision, num_workers, arguments.threads, arguments.parts)

    @batch  # type: ignore[untyped-decorator]
    def infer(text: np.ndarray) -> dict[str, np.ndarray]:
        answers = translator.translate([row[0].decode() for row in text])
        return {"translation": np.array([[answer.encode()] for answer in answers], dtype=np.object_)}

    config = TritonConfig(
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        grpc_port=arguments.port,
        allow_http=False,
        allow_metrics=False,
        log_verbose=0,
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name=MODEL,
            infer_func=[infer] * arguments.instances,
            inputs=[Tensor(name="text", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name="translation", dtype=bytes, shape=(1,))],
            config=ModelConfig(
                max_batch_size=arguments.max_batch_size,
                batcher=DynamicBatcher(max_queue_delay_microseconds=arguments.delay_ms * 1000),
            ),
        )
        triton.serve()


if __name__ == "__main__":
    main()
