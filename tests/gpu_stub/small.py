"""A program for the stub device: run by `test_programs.py` with one argument."""

import sys

import onnxruntime

print(sys.argv[1], onnxruntime.get_available_providers()[-2])
if sys.argv[1] == "fails":
    raise SystemExit(3)
