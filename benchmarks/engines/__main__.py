"""`python -m benchmarks.engines`."""

from benchmarks.engines.main import main

main()
