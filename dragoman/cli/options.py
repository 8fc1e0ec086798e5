"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Final

import typer

DEFAULT_SERVER: Final = "127.0.0.1:8500"
# Panels of `--help`.
SERVER: Final = "Server"
SEARCH: Final = "Search"
ServerOption = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar="DRAGOMAN_SERVER",
        help="Address of the server; the port may be left out.",
        rich_help_panel=SERVER,
    ),
]
ModelOption = Annotated[str, typer.Option(metavar="NAME", help="Which of the server's models; may be left out where it has one.")]
ModelVersionOption = Annotated[
    str, typer.Option(metavar="VERSION", help="Which version of it, by its name, content or label; by default the policy's choice.")
]
FromOption = Annotated[
    str, typer.Option("--from", metavar="LANGUAGE", help="Language of the texts, such as en; by default the model's.")
]
ToOption = Annotated[
    str, typer.Option("--to", metavar="LANGUAGE", help="Language of the translations, such as de; by default the model's.")
]
ConcurrencyOption = Annotated[int, typer.Option(min=1, max=1000, help="Requests under way at once.", rich_help_panel=SERVER)]
TimeoutOption = Annotated[
    float, typer.Option(min=0.001, help="Seconds for each request, retries included.", rich_help_panel=SERVER)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LengthPenaltyOption = Annotated[
    float | None,
    typer.Option(help="Exponent of the length in a beam's score; by default the model's, or 1.", rich_help_panel=SEARCH),
]
TokenOption = Annotated[str | None, typer.Option(envvar="DRAGOMAN_TOKEN", help="Bearer token.", rich_help_panel=SERVER)]
AuthorityOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="PEM file of the server's certificate authority; turns TLS on.", rich_help_panel=SERVER),
]
CertificateOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="PEM file of our certificate, where the server asks for one.", rich_help_panel=SERVER),
]
KeyOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="PEM file of the private key of --certificate.", rich_help_panel=SERVER)
]
ServerNameOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="Name in the server's certificate, if not the one of --server.", rich_help_panel=SERVER),
]
