"""The sessions that a program opens: the provider of each node, and every error; recorded while the program runs.

ONNX Runtime's profile has the provider of each node, including those that copy between host and device. A graph that is replayed
has no nodes in it, but the runs before it was captured have.
"""

import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime

_OriginalSession: Any = onnxruntime.InferenceSession
COPIES = ("MemcpyToHost", "MemcpyFromHost")


@dataclass(slots=True)
class Opened:
    """A session.

    Attributes:
        path: Of the graph.
        nodes: Operators that ran, by provider, and the number of nodes of each.
        refusals: Errors of opening or running it, with their number.
    """

    path: str
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON can have it, with the number of nodes that copy between host and device."""
        num_copies = sum(operators.get(name, 0) for operators in self.nodes.values() for name in COPIES)
        return {"path": self.path, "nodes": self.nodes, "num_copies": num_copies}


class Sessions:
    """All sessions that are opened while this takes the place of `onnxruntime.InferenceSession`."""

    def __init__(self) -> None:
        self._live: list[tuple[Opened, Any]] = []
        self._opened: list[Opened] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-stub-")
        owner = self

        class Session(_OriginalSession):  # type: ignore[misc]
            """A session that records its nodes and errors."""

            def __init__(self, path: Any, sess_options: Any = None, *arguments: Any, **named: Any) -> None:
                self._opened = Opened(str(path))
                owner._opened.append(self._opened)
                options = sess_options or onnxruntime.SessionOptions()
                options.enable_profiling = True
                options.profile_file_prefix = f"{owner._folder.name}/{len(owner._opened)}"
                self._recorded(super().__init__, path, options, *arguments, **named)
                owner._live.append((self._opened, self))

            def run(self, *arguments: Any, **named: Any) -> Any:
                return self._recorded(super().run, *arguments, **named)

            def run_with_iobinding(self, *arguments: Any, **named: Any) -> Any:
                return self._recorded(super().run_with_iobinding, *arguments, **named)

            def _recorded(self, run: Any, *arguments: Any, **named: Any) -> Any:
                try:
                    return run(*arguments, **named)
                except Exception as error:
                    self._opened.refusals[str(error)] += 1
                    raise

        onnxruntime.InferenceSession = Session

    def finish(self) -> list[Opened]:
        """Read the profiles; sessions are not to be used after it."""
        for opened, session in self._live:
            profile = Path(session.end_profiling())
            opened.nodes = _placement(json.loads(profile.read_text(encoding="utf-8")))
        self._live = []
        onnxruntime.InferenceSession = _OriginalSession
        return self._opened


def _placement(profile: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the number of nodes of each operator on each provider; a node that ran often is one."""
    nodes = {
        (event["args"]["provider"], event["args"]["op_name"], event["args"]["node_index"], event["name"])
        for event in profile
        if event.get("cat") == "Node" and event.get("args", {}).get("provider")
    }
    found: dict[str, dict[str, int]] = {}
    for provider, operator, _, _ in nodes:
        operators = found.setdefault(provider, {})
        operators[operator] = operators.get(operator, 0) + 1
    return found
