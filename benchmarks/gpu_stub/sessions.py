"""The sessions that a program opens: where their nodes were placed, and what they refused; noted as the program goes.

ONNX Runtime says in its profile where a node ran, the nodes that copy between host and device included. A graph that is replayed
has no nodes in it, but the runs that were captured before have.
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
        providers: That the session has, in order.
        nodes: Operators that ran, by provider, and how many nodes of each there are.
        refusals: What opening or running it raised, with how often.
    """

    path: str
    providers: list[str] = field(default_factory=list)
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def num_copies(self) -> int:
        """Nodes that copy between host and device."""
        return sum(operators.get(name, 0) for operators in self.nodes.values() for name in COPIES)


class Sessions:
    """All sessions that are opened while it is in place."""

    def __init__(self) -> None:
        """Take the place of `onnxruntime.InferenceSession`."""
        self.opened: list[Opened] = []
        self._live: list[tuple[Opened, Any]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-stub-")
        owner = self

        class Session(_OriginalSession):  # type: ignore[misc]
            """A session that notes what it does."""

            def __init__(self, path: Any, sess_options: Any = None, *arguments: Any, **named: Any) -> None:
                self._noted = owner._note(path)
                options = sess_options or onnxruntime.SessionOptions()
                options.enable_profiling = True
                options.profile_file_prefix = f"{owner._folder.name}/{len(owner.opened)}"
                try:
                    super().__init__(path, options, *arguments, **named)
                except Exception as error:
                    self._noted.refusals[str(error)] += 1
                    raise
                self._noted.providers = self.get_providers()
                owner._live.append((self._noted, self))

            def run(self, *arguments: Any, **named: Any) -> Any:
                return self._noting(super().run, *arguments, **named)

            def run_with_iobinding(self, *arguments: Any, **named: Any) -> Any:
                return self._noting(super().run_with_iobinding, *arguments, **named)

            def _noting(self, run: Any, *arguments: Any, **named: Any) -> Any:
                try:
                    return run(*arguments, **named)
                except Exception as error:
                    self._noted.refusals[str(error)] += 1
                    raise

        onnxruntime.InferenceSession = Session

    def finish(self) -> list[Opened]:
        """Read where nodes ran; sessions are not to be used after it."""
        for opened, session in self._live:
            profile = Path(session.end_profiling())
            opened.nodes = placement(json.loads(profile.read_text(encoding="utf-8")))
        self._live = []
        onnxruntime.InferenceSession = _OriginalSession
        return self.opened

    def _note(self, path: Any) -> Opened:
        self.opened.append(Opened(str(path) if isinstance(path, str | Path) else "from memory"))
        return self.opened[-1]


def placement(profile: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how many nodes of which operator ran on which provider; a node that ran often is one."""
    nodes = {
        (event["args"]["provider"], event["args"]["op_name"], event["args"]["node_index"], event["name"])
        for event in profile
        if event.get("cat") == "Node" and event.get("args", {}).get("provider")
    }
    found: dict[str, Counter[str]] = {}
    for provider, operator, _, _ in nodes:
        found.setdefault(provider, Counter())[operator] += 1
    return {provider: dict(sorted(operators.items())) for provider, operators in found.items()}
