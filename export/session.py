"""ONNX Runtime sessions of graphs, opened alike by the server, by the parity check of an export and by tests.

The server imports this file, so it imports neither torch nor ONNX.
"""

from pathlib import Path
from typing import TypeAlias

import onnxruntime

from dragoman.export.bundle import BundleError
from dragoman.export.processor import Platform, platform_of

# ONNX Runtime's provider option: flash attention (1), else memory-efficient attention (2). Its own choice is cuDNN (8) on compute
# capability 9 and later, which plans anew for each new shape; unfused products (16) remain where no other kernel can be used.
KERNEL_OPTIONS = {"sdpa_kernel": str(1 | 2)}


Session: TypeAlias = onnxruntime.InferenceSession
PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"
SPIN_MICROSECONDS = "200"
WRITTEN_SUFFIX = ".data"
MIN_WRITTEN_BYTES = "1024"  # smaller tensors stay in the graph
PRECISION_OPTION = "session.x64quantprecision"


def open_session(
    path: str | Path,
    num_threads: int,
    *,
    is_precise: bool = False,
    is_spinning: bool = True,
    is_packed: bool = True,
    is_written: bool = False,
    write_to: Path | None = None,
) -> Session:
    """Load a graph, and make sure that it runs where it was meant to.

    Args:
        path: The graph; its weights lie beside it.
        num_threads: Threads of the session's pool, the calling one included.
        is_precise: Whether products of 8-bit numbers are computed the way that cannot overflow on x86 without VNNI: for weights
            that are not pair-safe (see `quantize`), and processors that may overflow. It costs those a fifth of their speed.
        is_spinning: Whether the pool's threads stay awake for a moment when they have nothing to do.
        is_packed: Whether the session keeps weights of products in an order of its own, a copy in memory for each session. Without
            it they are read where the file is mapped, once for all sessions and processes; small batches then take up to twice as
            long, and in single precision a row's bits depend on the batch.
        is_written: Whether the graph is one that `write_to` has written, which has nothing left to improve.
        write_to: Where to put the graph as the session computes it, `NAME.onnx`, and beside it in `NAME.data` its weights, those of
            products also in the session's own order. A session of these files, with the same ONNX Runtime on the same kind of
            processor, maps that order instead of keeping a copy, and computes the same bits. Before that, the order has to be
            aligned, see `server.runtime.weights`.

    Raises:
        RuntimeError: If the files cannot be written, and for all else that ONNX Runtime has to say.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # errors are raised, too
    # Shapes differ from run to run: an arena and memory patterns keep something for each of them and never give it back.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    if is_spinning:
        options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_MICROSECONDS)
    else:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if is_precise:
        options.add_session_config_entry(PRECISION_OPTION, "1")
    if not is_packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if is_written:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if write_to is not None:
        _write(options, write_to)
    session = Session(path, options, providers=[PROVIDER])
    assert session.get_providers() == [PROVIDER]
    return session


def _write(options: onnxruntime.SessionOptions, path: Path) -> None:
    options.optimized_model_filepath = str(path)
    for name, value in (
        ("session.optimized_model_external_initializers_file_name", path.with_suffix(WRITTEN_SUFFIX).name),
        ("session.optimized_model_external_initializers_min_size_in_bytes", MIN_WRITTEN_BYTES),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(name, value)


def this_platform() -> Platform:
    """Return what decides the bits that sessions on this machine's CPU give."""
    return platform_of(onnxruntime.__version__, onnxruntime.get_build_info())


def has_cuda() -> bool:
    """Tell whether this ONNX Runtime was built for CUDA."""
    return CUDA_PROVIDER in onnxruntime.get_available_providers()


def open_on_cuda(path: Path) -> Session:
    """Load a graph on CUDA, as nothing but the gate does: the server keeps its caches there, see `server.runtime.device`.

    Raises:
        BundleError: If it does not run there.
    """
    session = Session(path, providers=[(CUDA_PROVIDER, KERNEL_OPTIONS), PROVIDER])
    if CUDA_PROVIDER not in session.get_providers():
        raise BundleError(f"{path}: there is a CUDA device, but ONNX Runtime does not load its CUDA provider")
    return session
