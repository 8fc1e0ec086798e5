"""`dragoman sign`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def sign(
    bundle: Annotated[Path, typer.Argument(help="Bundle to sign, or a `model.toml`.")],
    key: Annotated[
        Path, typer.Option(metavar="FILE", help="PEM file of a private Ed25519 key: openssl genpkey -algorithm ed25519 -out FILE.")
    ],
) -> None:
    """Sign a bundle: write `bundle.json.sig` beside its manifest, whose checksums cover every file.

    Every file is compared with the manifest before.
    """
    from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError
    from dragoman.export.signing import sign as write_signature

    if not bundle.is_dir():
        if bundle.name != "model.toml":
            raise BundleError(f"{bundle}: neither a bundle's folder nor a model.toml")
        typer.echo(f"signed {bundle} with key {write_signature(bundle, key)}")
        return
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    identity = write_signature(bundle / MANIFEST_FILE, key, opened.digest)
    typer.echo(f"signed {bundle}: {manifest.name} version {manifest.version}, with key {identity}")
