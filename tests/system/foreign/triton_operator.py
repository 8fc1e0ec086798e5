"""An operator with one of Triton's clients as it is; prints what became of each change as JSON. Run by `test_admin.py`."""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from tritonclient.utils import InferenceServerException


def became(change: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Make a change; return `done`, or why it is refused."""
    try:
        change(*arguments, **options)
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    return "done"


def main() -> None:
    protocol, address, token, model = sys.argv[1:]
    client = importlib.import_module(f"tritonclient.{protocol}").InferenceServerClient(address)
    mine = {"headers": {"authorization": f"Bearer {token}"}}
    found = {
        "by nobody": became(client.unload_model, model),
        "unload": became(client.unload_model, model, **mine),
        "otherwise": became(client.load_model, model, config="{}", **mine),
        "another": became(client.load_model, "none", **mine),
        "load": became(client.load_model, model, **mine),
    }
    print(json.dumps(found))
    client.close()


if __name__ == "__main__":
    main()
