"""`dragoman gpu-check`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.model.errors import InputError

if TYPE_CHECKING:
    from dragoman.server.runtime.device.check import Finding
    from dragoman.server.runtime.device.device import Device

app = typer.Typer()


@app.command()
def gpu_check(
    bundle: Annotated[Path, typer.Argument(help="Bundle in fp16 or bf16.")],
    device: Annotated[
        str, typer.Option(envvar="DRAGOMAN_DEVICE", help="cuda or cuda:N; cpu rehearses it without a GPU, for an fp16 bundle.")
    ] = "cuda",
    max_slots: Annotated[int, typer.Option(envvar="DRAGOMAN_MAX_SLOTS", min=1, help="As the server's.")] = 64,
    gpu_memory_gib: Annotated[float, typer.Option(envvar="DRAGOMAN_GPU_MEMORY_GIB", min=0, help="As the server's.")] = 0.0,
    gpu_attention_kernels: Annotated[
        str, typer.Option(envvar="DRAGOMAN_GPU_ATTENTION_KERNELS", help="As the server's.")
    ] = "flash,efficient",
) -> None:
    """Try everything that serving a bundle on a GPU takes; the exit code is 0 if all of it works.

    Each line says what was tried, whether it works, and what to do if not.
    """
    from dragoman.export.attention_kernels import kernel_bits
    from dragoman.server.runtime.device.check import KERNEL_VARIABLE, GpuCheck, Wanted, cuda_findings

    os.environ[KERNEL_VARIABLE] = "1"  # read when a session is made
    ordinal = _ordinal(device)
    try:
        kernel_bits(gpu_attention_kernels)
    except ValueError as error:
        raise InputError(f"--gpu-attention-kernels: {error}") from error

    def open_device() -> "Device":
        if ordinal is None:
            from dragoman.server.runtime.device.host import HostDevice

            return HostDevice()
        from dragoman.server.runtime.device.cuda import CudaDevice

        return CudaDevice(ordinal, attention_kernels=gpu_attention_kernels)

    def findings() -> "Iterator[Finding]":
        has_device = True
        if ordinal is not None:
            for finding in cuda_findings(ordinal):
                has_device &= finding.is_good
                yield finding
        if has_device:
            yield from GpuCheck(bundle, open_device, Wanted(max_slots, max_bytes=int(gpu_memory_gib * 2**30))).run()

    is_good = True
    for finding in findings():
        typer.echo(str(finding))
        is_good &= finding.is_good
    raise typer.Exit(int(not is_good))


def _ordinal(device: str) -> int | None:
    """Return a CUDA device's number; None for the CPU.

    Raises:
        InputError: If it is neither.
    """
    from dragoman.server.runtime.providers import REQUEST

    found = REQUEST.fullmatch(device)
    if found is None:
        raise InputError(f"--device must be cpu, cuda or cuda:N, not {device!r}")
    return None if device == "cpu" else int(found[1] or 0)
