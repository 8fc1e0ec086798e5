"""Small graphs, one by one, with inputs of zeros: does CUDA's provider take them? Run in the bed.

    python -m benchmarks.gpu_stub run -m benchmarks.gpu_stub.nodes FOLDER

The answer is JSON: for each `NAME.onnx` in the folder `refusal`, the text of what loading or running it raised, and `provider`,
where its node ran. Sizes that a graph has a name for are those of `SIZES`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.gpu_stub.sessions import Sessions

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
SIZES = {"B": 2, "N": 2, "S": 8, "T": 8, "K": 8}
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int32)": np.int32, "tensor(int64)": np.int64}
LENGTH = 8
"""What a scalar input says: as many keys as there is room for."""


def tried(path: Path) -> dict[str, str]:
    """Load a graph and run it once."""
    sessions = Sessions()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    refusal = ""
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=[CUDA, CPU])
        session.run(None, {value.name: zeros(value) for value in session.get_inputs()})
    except Exception as error:  # the library's errors have no common base but this
        refusal = str(error)
    (opened,) = sessions.finish()
    return {"refusal": refusal, "provider": " ".join(sorted(opened.nodes))}


def zeros(value: Any) -> Any:
    """Return an input that a graph describes."""
    shape = [SIZES.get(size, 2) if isinstance(size, str) else size for size in value.shape]
    array = np.zeros(shape, TYPES[value.type])
    if shape == [1]:
        array[:] = LENGTH
    return array


def main() -> None:
    """Try the graphs of a folder."""
    folder = Path(sys.argv[1])
    print(json.dumps({path.stem: tried(path) for path in sorted(folder.glob("*.onnx"))}, indent=2))


if __name__ == "__main__":
    main()
