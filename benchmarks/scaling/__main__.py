"""`python -m benchmarks.scaling`."""

from benchmarks.scaling.main import main

main()
