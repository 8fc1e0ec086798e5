"""`python -m benchmarks.swaps`."""

from benchmarks.swaps.main import main

main()
