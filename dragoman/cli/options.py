"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_SERVER = "127.0.0.1:8500"
ServerOption = Annotated[str, typer.Option(metavar="HOST:PORT", envvar="DRAGOMAN_SERVER", help="Address of the server.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BeamsOption = Annotated[int, typer.Option(min=1, help="Width of beam search; 1 is greedy.")]
LengthPenaltyOption = Annotated[float | None, typer.Option(help="Exponent of the length in a beam's score; by default 1.")]
TokenOption = Annotated[str | None, typer.Option(envvar="DRAGOMAN_TOKEN", help="Bearer token.")]
AuthorityOption = Annotated[Path | None, typer.Option(help="PEM file of the server's certificate authority; turns TLS on.")]
CertificateOption = Annotated[Path | None, typer.Option(help="PEM file of our certificate, where the server asks for one.")]
KeyOption = Annotated[Path | None, typer.Option(help="PEM file of the private key of --certificate.")]
ServerNameOption = Annotated[
    str, typer.Option(metavar="NAME", help="Name in the server's certificate, if not the one of --server.")
]
