"""Messages, mostly wrong, to each method of a running server, which answers each as documented and stays as it was.

1,500 messages by default, 10,000 with `TEST_LONG=1`. `TEST_FUZZ_SEED` chooses them, `TEST_FUZZ_MESSAGES` their number; a failure
prints both, and the messages themselves.
`TEST_FUZZ_CASE` sends one case alone.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from dragoman.client.sync import Client
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.v1.generation_pb2 import GenerateBatchResponse, GenerateBulkResponse, GenerateRequest, GenerateResponse
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.shelf import Shelf
from tests.system.fuzz.caller import send
from tests.system.fuzz.cases import Case, cases, make_case, methods
from tests.system.fuzz.oracle import Ending, complaints

pytestmark = pytest.mark.e2e

SEED = int(os.environ.get("TEST_FUZZ_SEED", "16"))
NUM_MESSAGES = int(os.environ.get("TEST_FUZZ_MESSAGES", "10000" if os.environ.get("TEST_LONG") else "1500"))
# Sent before anything is measured: pools of threads, arenas and caches grow to what they need once.
NUM_WARMUP_MESSAGES = 1_000
MAX_GROWTH_BYTES = 64 * 2**20
# gRPC keeps idle threads for a while, up to about as many as there are cores.
MAX_MORE_THREADS = 4
COUNTED = ("Generate", "GenerateStream", "GenerateBatch", "GenerateBulk", "Score")
UNCOUNTED = ("ListModels", "GetModel", "Check", "Watch", "ServerReflectionInfo")
BLAMED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
# With these a call may have ended for its caller before the server's answer came, or gRPC ended it before the server saw it.
LEFT = (
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)
KNOWN = GenerateRequest(
    text="a dog runs over the grass", max_new_tokens=20, num_beams=4, num_return_sequences=4, return_log_probs=True
)


@pytest.fixture(scope="session")
def short(shelf: Shelf) -> Path:
    """Bundle of a random model, `alpha`, that never ends an answer but has none longer than 64 tokens, as nobody waits for them.

    It is told languages and has defaults, which requests may say nothing of.
    """
    return shelf.get("short", make_short) / "bundles" / "alpha"


def make_short(folder: Path) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        source_vocab_size=280,
        target_vocab_size=280,
        d_model=64,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=64,
        max_target_positions=64,
        has_output_bias=True,
    )
    model = Transformer(config).eval()
    assert model.decoder.output_bias is not None
    model.decoder.output_bias.data[config.eos_id] = -60
    tokenizer = ByteLevelTokenizer.train(["a dog runs over the grass"], 280)
    german = Language(code="deu_Latn", names=["de"], source_prefix=[270], source_suffix=[271], target_prefix=[272])
    french = Language(code="fra_Latn", names=["fr"], target_prefix=[273, 274], decoder_start_id=275)
    languages = Languages(source=[german, french], target=[german, french], default_source="fra_Latn", default_target="deu_Latn")
    template = Template(source_prefix=[276], task="{source} to {target}: ")
    defaults = Defaults(num_beams=2, length_penalty=0.5, no_repeat_ngram_size=3, min_new_tokens=2, is_end_forced=True)
    checkpoint = Checkpoint("alpha", model, Tokenizers.shared(tokenizer), template, languages, defaults)
    checkpoint.save(folder / "checkpoints" / "alpha")
    export_checkpoint(folder / "checkpoints" / "alpha", folder / "bundles" / "alpha")


def test_no_message_does_any_harm(serve: Any, short: Path) -> None:
    problems: list[str] = []
    with serve(short, "--max-slots", "16") as server, Client(server.address) as client:
        # The Open Inference Protocol has a fuzzer of its own: tests/server/faces/oip/test_fuzz.py.
        known = methods([name for name in services(server.address) if not name.startswith("inference.")])
        assert {method.name for method in known.values()} >= {*COUNTED, *UNCOUNTED}
        right = answer(server.address)
        send(server.address, cases(SEED + 1, known, NUM_WARMUP_MESSAGES))
        assert client.is_ready()  # its connection is there before descriptors are counted
        settle(server)
        before, refused_before = footprint(server), refused(server)

        chosen = os.environ.get("TEST_FUZZ_CASE")
        endings = send(
            server.address, cases(SEED, known, NUM_MESSAGES) if chosen is None else [make_case(SEED, int(chosen), known)]
        )
        problems += wrong_endings(endings)

        settle(server)
        if answer(server.address) != right:
            problems.append("the known request has another answer")
        if not (client.is_ready() and client.is_ready("alpha") and client.is_ready("liveness")):
            problems.append("health says that it does not serve")
        problems += wrong_counts(refused(server) - refused_before, endings)
        wait_until(lambda: is_back(before, footprint(server)), lambda: f"{footprint(server)} is not what it was, {before}")
        assert server.metric("dragoman_engine_restarts_total") == 0
        assert server.terminate() == 0
    bad = [event for event in server.events if is_bad(event)]
    if bad:
        problems.append(f"{len(bad)} lines in the log like {str(bad[0])[:2000]}")
    if problems:
        pytest.fail(f"seed {SEED}, {NUM_MESSAGES} messages:\n" + "\n".join(problems), pytrace=False)


def is_bad(event: dict[str, Any]) -> bool:
    """Tell a line of the log that must not be there."""
    return event.get("level") in ("error", "critical") or "Traceback" in str(event)


def wrong_endings(endings: list[tuple[Case, Ending]]) -> list[str]:
    """Return what is wrong with how calls ended, each kind of it once."""
    kinds: dict[tuple[str, str], str] = {}
    for case, ending in endings:
        for complaint in complaints(case, ending):
            kinds.setdefault((case.path, complaint[:40]), f"{complaint}\n  {case.describe()[:2000]}")
    return list(kinds.values())


def wrong_counts(counted: Counter[grpc.StatusCode], endings: list[tuple[Case, Ending]]) -> list[str]:
    """Return where the server's counts are not what callers saw; a caller that left first saw another ending."""
    problems = []
    for code in BLAMED:
        at_least = at_most = 0
        for case, ending in endings:
            if case.method is None or case.method.name not in COUNTED:
                continue
            num_seen = (ending.code is code) + [item.error.code for item in batch_items(case, ending)].count(code.value[0])
            at_least += num_seen
            at_most += max(1, num_requests(case)) if ending.code in LEFT else num_seen
        if not at_least <= counted[code] <= at_most:
            problems.append(f"{code.name}: the server counted {counted[code]}, callers saw {at_least} to {at_most}")
    return problems


def batch_items(case: Case, ending: Ending) -> list[Any]:
    match case.method.name if case.method is not None else "":
        case "GenerateBatch":
            return [GenerateBatchResponse.FromString(data) for data in ending.answers]
        case "GenerateBulk":
            return [item for data in ending.answers for item in GenerateBulkResponse.FromString(data).answers]
        case _:
            return []


def num_requests(case: Case) -> int:
    """Return how many requests a case has at the most; each of several in a message takes two bytes at least."""
    assert case.method is not None
    if case.method.name != "GenerateBulk":
        return len(case.messages)
    return sum(max(1, len(data) // 2) for data in case.messages)


def services(address: str) -> list[str]:
    """Return what the server says it has."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = ServerReflectionRequest(list_services="")
        [response] = ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=60)
    return [service.name for service in response.list_services_response.service]


def answer(address: str) -> list[Any]:
    """Return the answers to a known request, without what differs from call to call."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        response: GenerateResponse = GenerationStub(channel).Generate(KNOWN, timeout=60)
    return [response.text, [item.SerializeToString(deterministic=True) for item in response.answers]]


def refused(server: Any) -> Counter[grpc.StatusCode]:
    """Return the failures that a caller's message is to blame for, by status."""
    return Counter({code: int(server.metric("dragoman_requests_failed_total", code=code.name)) for code in BLAMED})


def footprint(server: Any) -> dict[str, dict[str, int]]:
    """Return what the server's processes hold: open descriptors, threads, resident bytes."""
    engine = next(event["engine_pid"] for event in server.events if event["event"] == "engine ready")
    return {name: held(Path(f"/proc/{pid}")) for name, pid in (("front end", server.process.pid), ("engine", engine))}


def held(process: Path) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    resident = int(status["VmRSS"].split()[0]) * 1024
    return {"descriptors": len(list((process / "fd").iterdir())), "threads": int(status["Threads"]), "bytes": resident}


def is_back(before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> bool:
    room = {"descriptors": 0, "threads": MAX_MORE_THREADS, "bytes": MAX_GROWTH_BYTES}
    return all(now[process][what] <= before[process][what] + room[what] for process in before for what in room)


def settle(server: Any) -> None:
    """Wait until nothing runs or waits."""
    gauges = ("slots_in_use", "num_requests_running", "num_requests_waiting", "num_tokens_waiting")
    wait_until(lambda: not any(server.metric(f"dragoman_{name}") for name in gauges), lambda: "something still runs or waits")


def wait_until(condition: Callable[[], bool], what: Callable[[], str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.02)
