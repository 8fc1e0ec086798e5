"""`dragoman gpu-check`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dragoman.server.runtime.device.check import Finding
    from dragoman.server.runtime.device.device import Device

app = typer.Typer()


@app.command(epilog="Whatever else decides what is loaded is read as `dragoman serve` reads it: flags, DRAGOMAN_…, --config.")
def gpu_check(
    bundle: Annotated[Path, typer.Argument(help="Bundle in fp16 or bf16.")],
    device: Annotated[
        str | None, typer.Option(help="cuda or cuda:N; cpu rehearses it without a GPU, for an fp16 bundle.", show_default="cuda")
    ] = None,
    max_slots: Annotated[int | None, typer.Option(help="As the server's.")] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(help="As the server's.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings of the server, TOML; flags and environment go before it.")] = None,
) -> None:
    """Try everything that serving a bundle on a GPU takes; the exit code is 0 if all of it works.

    Each line says what was tried, whether it works, and what to do if not.
    """
    from dragoman.server.config import load
    from dragoman.server.runtime.device.check import KERNEL_VARIABLE, GpuCheck, Wanted, cuda_findings

    os.environ[KERNEL_VARIABLE] = "1"  # read when a session is made
    flags = {"models": bundle.parent, "device": device, "max_slots": max_slots, "gpu_memory_gib": gpu_memory_gib}
    settings = load(flags, config)
    ordinal = _ordinal(settings.device)
    wanted = Wanted(settings.max_slots, max_bytes=settings.gpu_memory_bytes)

    def open_device() -> "Device":
        if ordinal is None:
            from dragoman.server.runtime.device.device import HostDevice

            return HostDevice()
        from dragoman.server.runtime.device.cuda import CudaDevice

        return CudaDevice(ordinal)

    def findings() -> "Iterator[Finding]":
        has_device = True
        if ordinal is not None:
            for finding in cuda_findings(ordinal):
                has_device &= finding.is_good
                yield finding
        if has_device:
            yield from GpuCheck(bundle, open_device, wanted).run()

    is_good = True
    for finding in findings():
        typer.echo(str(finding))
        is_good &= finding.is_good
    raise typer.Exit(int(not is_good))


def _ordinal(device: str) -> int | None:
    """Return a CUDA device's number, the first one's where any would do; None for the CPU."""
    if device == "cpu":
        return None
    return int(device.partition(":")[2] or 0)
