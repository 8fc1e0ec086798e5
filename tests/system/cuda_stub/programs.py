"""Programs for the stub device, each with one JSON document on standard output: exercise, nodes, shortage, recover.

python -m tests.system.cuda_stub.programs PROGRAM FOLDER [ARGUMENT ...]
"""

import json
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_runner, load_scorer
from dragoman.server.engine.settings import DeviceSettings, Limits
from dragoman.server.runtime.device import cuda
from tests.system.cuda_stub.watch import Watch

MAX_SLOTS, PREFILL_TOKENS = 12, 256
# More candidates than a graph is captured for.
NUM_WIDE = 100
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


_OriginalSession: Any = onnxruntime.InferenceSession
COPIES = ("MemcpyToHost", "MemcpyFromHost")


def rows(num_rows: int, position: int) -> tuple[Any, Any]:
    return np.full(num_rows, 3, np.int64), np.full(num_rows, position, np.int64)


def source(length: int) -> list[int]:
    return [5] * (length - 1) + [1]


class Sessions:
    """The sessions that are opened while this takes the place of `onnxruntime.InferenceSession`.

    ONNX Runtime's profile has the provider of each node, including those that copy between host and device. A graph that is
    replayed has no nodes in it, but the runs before it was captured have.
    """

    def __init__(self) -> None:
        self._opened: list[tuple[Any, dict[str, Any]]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-stub-")
        owner = self

        class Session(_OriginalSession):  # type: ignore[misc]
            def __init__(self, path: Any, sess_options: Any = None, *arguments: Any, **named: Any) -> None:
                self.record: dict[str, Any] = {"path": str(path), "refusals": Counter[str]()}
                owner._opened.append((self, self.record))
                options = sess_options or onnxruntime.SessionOptions()
                options.enable_profiling = True
                options.profile_file_prefix = f"{owner._folder.name}/{len(owner._opened)}"
                self._recorded(super().__init__, path, options, *arguments, **named)
                self.record["is_open"] = True

            def run(self, *arguments: Any, **named: Any) -> Any:
                return self._recorded(super().run, *arguments, **named)

            def run_with_iobinding(self, *arguments: Any, **named: Any) -> Any:
                return self._recorded(super().run_with_iobinding, *arguments, **named)

            def _recorded(self, run: Any, *arguments: Any, **named: Any) -> Any:
                try:
                    return run(*arguments, **named)
                except Exception as error:
                    self.record["refusals"][str(error)] += 1
                    raise

        onnxruntime.InferenceSession = Session

    def finish(self) -> list[dict[str, Any]]:
        """Return of each session its `path`, its `refusals`, its `nodes` of each operator by provider, and how many of them copy.

        A node that ran often is one. Sessions are not to be used after it.
        """
        for session, record in self._opened:
            nodes: dict[str, Counter[str]] = {}
            if record.pop("is_open", False):
                profile = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
                ran = [event for event in profile if event.get("cat") == "Node" and event.get("args", {}).get("provider")]
                keys = ("provider", "op_name", "node_index")
                for provider, operator, *_ in {(*(event["args"][key] for key in keys), event["name"]) for event in ran}:
                    nodes.setdefault(provider, Counter())[operator] += 1
            num_copies = sum(operators[name] for operators in nodes.values() for name in COPIES)
            record |= {"nodes": nodes, "num_copies": num_copies}
        onnxruntime.InferenceSession = _OriginalSession
        return [record for _, record in self._opened]


class Exercise:
    """Every part of a bundle, through the runner that serves it; after an error the other parts go on."""

    def __init__(self, directory: Path) -> None:
        self.bundle = Bundle.open(directory)
        self.runner: Any = None

    def run(self) -> dict[str, Any]:
        """Return of each part its `error`, empty or a text, and the counts of `Watch.read`; and all sessions."""
        watch, sessions, found = Watch(), Sessions(), {}
        for name in ("load", "warm_up", "prefill", "steps", "replay", "wide_steps", "looks", "copies", "score"):
            watch.reset()
            error = ""
            try:
                getattr(self, name)()
            except Exception as raised:  # the other parts go on
                error = f"{type(raised).__name__}: {raised}"
            found[name] = {"error": error, **watch.read()}
        return found | {"sessions": sessions.finish()}

    def load(self) -> None:
        limits = Limits(MAX_SLOTS, PREFILL_TOKENS)
        self.runner = load_runner(self.bundle, limits, 1, DeviceSettings(name="cuda"), is_warmed_up=False)

    def warm_up(self) -> None:
        self.runner.warm_up()

    def prefill(self) -> None:
        """One source, many of different lengths in rows that are apart, and the longest there can be."""
        longest = self.bundle.manifest.max_source_tokens
        self.runner.prefill([source(3)], [0])
        self.runner.prefill([source(1 + 3 * i % longest) for i in range(5)], [9, 1, 7, 2, 4])
        self.runner.prefill([source(longest)], [11])

    def steps(self) -> None:
        for num_rows in range(1, MAX_SLOTS + 1):
            self._step(num_rows, num_rows % self.bundle.manifest.max_target_tokens, 1)

    def replay(self) -> None:
        for position in range(4):
            for num_rows in (MAX_SLOTS, 1):
                for num_candidates in (1, 5):
                    self._step(num_rows, position, num_candidates)

    def wide_steps(self) -> None:
        self._step(3, 2, min(NUM_WIDE, self.bundle.manifest.num_choices))

    def looks(self) -> None:
        self._step(4, 1, 4)
        self.runner.refetch(*rows(3, 1), min(NUM_WIDE, self.bundle.manifest.num_choices), 1)

    def copies(self) -> None:
        self.runner.copy_row(3, 0, 2)
        self.runner.copy_positions(0, 1, 0, 2)

    def score(self) -> None:
        scorer = load_scorer(self.bundle, 1, self.runner)
        if not scorer.is_loaded:
            scorer.open()
        for layer in (None, 0):
            scorer.score(source(6), source(4), layer)

    def _step(self, num_rows: int, position: int, num_candidates: int) -> None:
        candidates = self.runner.step(*rows(num_rows, position), num_candidates)
        assert candidates.ids.shape == candidates.log_probs.shape == (num_rows, num_candidates)


SIZES = {"B": 2, "N": 2, "S": 8, "T": 8, "K": 8}
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32, "tensor(int64)": np.int64}


def nodes(folder: Path) -> Any:
    """Load and run each graph of a folder; return of each the `refusal`, a text or empty, and the `provider` of its node."""

    def zeros(value: Any) -> Any:
        shape = [SIZES.get(size, 2) if isinstance(size, str) else size for size in value.shape]
        return np.full(
            shape, 8 if shape == [1] else 0, TYPES[value.type]
        )  # a scalar is a length: as many keys as there is room for

    def tried(path: Path) -> dict[str, str]:
        sessions, options, refusal = Sessions(), onnxruntime.SessionOptions(), ""
        options.log_severity_level = 4
        try:
            # Flash and memory-efficient attention: the provider's first choice is cuDNN, and the stub's plans nothing.
            session = onnxruntime.InferenceSession(str(path), options, providers=[(CUDA, {"sdpa_kernel": "3"}), CPU])
            session.run(None, {value.name: zeros(value) for value in session.get_inputs()})
        except Exception as error:  # the library's errors have no common base but this
            refusal = str(error)
        (opened,) = sessions.finish()
        return {"refusal": refusal, "provider": " ".join(sorted(opened["nodes"]))}

    return {path.stem: tried(path) for path in sorted(folder.glob("*.onnx"))}


class TightDevice(cuda.CudaDevice):
    """A CUDA device whose sessions get their weights and a little more, and replay nothing."""

    spare_bytes = 0

    def open_session(self, path: Path, *, max_arena_bytes: int, is_captured: bool) -> onnxruntime.InferenceSession:
        del max_arena_bytes, is_captured
        weights = path.with_suffix(".weights").stat().st_size
        if path.stem != "encoder":  # it has the table of tokens of the encoder's file, and the output projection twice as wide
            weights = 3 * sum(file.stat().st_size for file in path.parent.glob("*.weights"))
        return super().open_session(path, max_arena_bytes=weights + self.spare_bytes, is_captured=False)


def shortage(folder: Path) -> Any:
    """Encode a full batch and decode a full step with less and less memory beyond the weights.

    For each size: the `error`, empty where all went well; `num_refusals`, the runs that the arena had no room for, after each of
    which the runner tries a smaller part; and ONNX Runtime's `texts`.
    """
    cuda.CudaDevice = TightDevice  # type: ignore[misc]
    bundle, found = Bundle.open(folder), []
    longest = bundle.manifest.max_source_tokens
    for spare_bytes in (2**size for size in range(25, 11, -1)):
        TightDevice.spare_bytes, sessions, error = spare_bytes, Sessions(), ""
        try:
            limits = Limits(MAX_SLOTS, MAX_SLOTS * longest)
            runner = load_runner(bundle, limits, 1, DeviceSettings(name="cuda"), is_warmed_up=False)
            runner.prefill([source(longest) for _ in range(MAX_SLOTS)], range(MAX_SLOTS))
            runner.step(*rows(MAX_SLOTS, 0), 1)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        texts = Counter[str]()
        for opened in sessions.finish():
            texts.update(opened["refusals"])
        found.append({"error": error, "num_refusals": texts.total(), "texts": sorted(texts)})
    return found


def recover(folder: Path, function: str, status: str, after: str) -> Any:
    """Warm up with a function of CUDA that fails once; then serve."""
    watch, bundle = Watch(), Bundle.open(folder)
    runner: Any = load_runner(bundle, Limits(4, 128), 1, DeviceSettings(name="cuda"), is_warmed_up=False)
    watch.fail(function, int(status), after=int(after))
    runner.warm_up()
    watch.reset()
    runner.prefill([[5, 6, 1], [5, 1]], [0, 1])
    for position in range(3):
        runner.step(*rows(2, position), 1)
    load_scorer(bundle, 1, runner).score([5, 6, 1], [5, 1])
    seen = watch.read()
    return {
        "is_disabled": runner.graphs.is_disabled,
        "reason": runner.graphs.reason,
        "rows_at_once": runner._rows_at_once[False],
        "graphs": seen["graphs"],
        "num_kernels": sum(kernel["run"] for kernel in seen["kernels"].values()),
        "faults": seen["faults"],
    }


def main() -> None:
    program, folder, *arguments = sys.argv[1:]
    with redirect_stdout(sys.stderr):  # where the log goes, too
        programs = {"exercise": lambda folder: Exercise(folder).run(), "nodes": nodes, "shortage": shortage, "recover": recover}
        found = programs[program](Path(folder), *arguments)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
