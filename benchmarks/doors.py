"""What each protocol costs: requests a second and latencies of the same requests through every face.

    python -m benchmarks.doors --data data/multi30k [--bundle bundles/en-de] [--quick]

One sender, in a process of its own on the same cores, keeps 1, 16 and 64 requests under way: over gRPC to a server without HTTP
and to one whose port of HTTP nobody uses; over HTTP, and by the Open Inference Protocol over both, to a third. The sides take
turns, in another order each round; medians of the rounds count, also of the ratios to the first side in the same round. All of them
are asked the same texts, one model, greedy. The answers are looked at: a side that had others would be no side.
"""

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import grpc
from aiohttp import ClientSession, TCPConnector

from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel, cpu_seconds
from benchmarks.overload import percentile
from dragoman.inference.inference_pb2 import ModelInferRequest
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.model.corpus import read_lines
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub

CONCURRENCIES = (1, 16, 64)
ALONE, GRPC, OIP_GRPC, HTTP, OIP_REST = "gRPC, HTTP off", "gRPC", "OIP gRPC", "HTTP/JSON", "OIP REST"
Ask = Callable[[str], Awaitable[str]]
Side = TypeVar("Side")


@asynccontextmanager
async def by_grpc(address: str, model: str) -> Any:
    """Give what asks over gRPC."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]

        async def ask(text: str) -> str:
            answer = await stub.Generate(GenerateRequest(model=model, text=text, num_beams=1))
            return str(answer.text)

        yield ask


@asynccontextmanager
async def by_http(address: str, model: str) -> Any:
    """Give what asks over HTTP; connections are kept and used again."""
    async with ClientSession(f"http://{address}", connector=TCPConnector(limit=0)) as session:

        async def ask(text: str) -> str:
            async with session.post("/v1/generate", json={"model": model, "text": text, "numBeams": 1}) as response:
                response.raise_for_status()
                return str((await response.json())["text"])

        yield ask


@asynccontextmanager
async def by_oip_grpc(address: str, model: str) -> Any:
    """Give what asks by the Open Inference Protocol over gRPC, as Triton's client does: the text raw, the option as a parameter."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]

        async def ask(text: str) -> str:
            encoded = text.encode()
            request = ModelInferRequest(model_name=model, raw_input_contents=[len(encoded).to_bytes(4, "little") + encoded])
            request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            request.parameters["num_beams"].int64_param = 1
            answer = await stub.ModelInfer(request)
            names = [output.name for output in answer.outputs]
            return str(answer.raw_output_contents[names.index("text_output")][4:].decode())

        yield ask


@asynccontextmanager
async def by_oip_rest(address: str, model: str) -> Any:
    """Give what asks by the Open Inference Protocol over HTTP, with JSON alone."""
    async with ClientSession(f"http://{address}", connector=TCPConnector(limit=0)) as session:

        async def ask(text: str) -> str:
            tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}
            body = {"inputs": [tensor], "parameters": {"num_beams": 1}}
            async with session.post(f"/v2/models/{model}/infer", json=body) as response:
                response.raise_for_status()
                outputs = {output["name"]: output["data"] for output in (await response.json())["outputs"]}
            return str(outputs["text_output"][0])

        yield ask


OPENERS = {ALONE: by_grpc, GRPC: by_grpc, OIP_GRPC: by_oip_grpc, HTTP: by_http, OIP_REST: by_oip_rest}


async def answers(side: str, address: str, model: str, texts: list[str]) -> list[str]:
    """Return what a side answers to some texts."""
    async with OPENERS[side](address, model) as ask:
        return [await ask(text) for text in texts]


def send(side: str, address: str, model: str, texts: list[str], concurrency: int, seconds: float) -> tuple[float, list[float]]:
    """Keep so many requests under way for so long; return answers a second, and every latency in seconds, rising."""
    return asyncio.run(_send(side, address, model, texts, concurrency, seconds))


async def _send(
    side: str, address: str, model: str, texts: list[str], concurrency: int, seconds: float
) -> tuple[float, list[float]]:
    latencies: list[float] = []
    async with OPENERS[side](address, model) as ask:
        await ask(texts[0])
        began = time.perf_counter()

        async def keep_asking(own: Iterator[str]) -> None:
            while (sent := time.perf_counter()) < began + seconds:
                await ask(next(own))
                latencies.append(time.perf_counter() - sent)

        await asyncio.gather(*(keep_asking(itertools.cycle(texts[i:] + texts[:i])) for i in range(concurrency)))
        wall = time.perf_counter() - began
    return len(latencies) / wall, sorted(latencies)


def rotated(sides: list[Side], number: int) -> list[Side]:
    """Return the sides, beginning with another in each round."""
    start = number % len(sides)
    return sides[start:] + sides[:start]


def measure(
    sides: Mapping[str, tuple[str, int]], model: str, texts: list[str], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Return a row for each side, of an address and the front end's process, and number of callers; the sides take turns."""
    rows = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as sender:
        for concurrency in CONCURRENCIES:
            found: dict[str, list[tuple[float, list[float], float]]] = {side: [] for side in sides}
            for number in range(rounds + 1):
                for side, (address, front_end) in rotated(list(sides.items()), number):
                    before = cpu_seconds(front_end)
                    rate, latencies = sender.submit(send, side, address, model, texts, concurrency, seconds).result()
                    if number:  # the first round warms up
                        found[side].append((rate, latencies, (cpu_seconds(front_end) - before) / (len(latencies) + 1)))
            for side, turns in found.items():
                rates, bases = ([rate for rate, _, _ in found[each]] for each in (side, ALONE))
                ratio = median(rate / base for rate, base in zip(rates, bases, strict=True))  # of the same round
                row = {"callers": concurrency, "side": side, "requests/s": round(median(rates), 1), f"of {ALONE}": round(ratio, 3)}
                for percent in (50, 99):
                    row[f"p{percent} ms"] = round(median(percentile(seconds, percent) for _, seconds, _ in turns) * 1000, 2)
                row["front end µs"] = round(median(cost for _, _, cost in turns) * 1e6)
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle", type=Path, default=Path("bundles/en-de"))
    parser.add_argument("--threads", type=int, default=1, help="Of the engine.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="Of each side's turn.")
    parser.add_argument("--quick", action="store_true", help="One round of a second each, and nothing is written.")
    arguments = parser.parse_args()
    rounds, seconds = (1, 1.0) if arguments.quick else (arguments.rounds, arguments.seconds)
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    threads = ("--num-threads", str(arguments.threads))
    started = time.monotonic()
    with ExitStack() as stack:
        alone, idle, served = (
            stack.enter_context(ServedModel(arguments.bundle, *threads, has_http=has_http)) for has_http in (False, True, True)
        )
        addresses = {ALONE: alone.address, GRPC: idle.address, OIP_GRPC: served.address}
        addresses |= dict.fromkeys((HTTP, OIP_REST), served.http_address)
        told = [asyncio.run(answers(*side, arguments.bundle.name, texts[:20])) for side in addresses.items()]
        if any(one != told[0] for one in told):
            raise SystemExit("the sides do not answer alike")
        pids = dict.fromkeys(addresses, served.front_pid) | {ALONE: alone.front_pid, GRPC: idle.front_pid}
        sides = {side: (address, pids[side]) for side, address in addresses.items()}
        rows = measure(sides, arguments.bundle.name, texts, rounds, seconds)
    if arguments.quick:
        return
    notes = [
        f"`{arguments.bundle.name}`, threads of the engine: {arguments.threads}, greedy, captions of test_2016, closed loop; "
        f"medians of {rounds} rounds of {seconds:g} s a side, in turns, sender and servers on the same cores. "
        "`front end µs` is the processor time of the front end's process a request. "
        f"Load of the machine when it ended: {os.getloadavg()[1]:.1f}. "
        f"{time.monotonic() - started:.0f} s to make."
    ]
    about = environment("onnxruntime", "grpcio", "aiohttp") | {"threads": arguments.threads, "rounds": rounds, "seconds": seconds}
    write("doors", "The same requests through every protocol", about, rows, notes)


if __name__ == "__main__":
    main()
