"""`python -m benchmarks.trained`."""

from benchmarks.trained.main import main

main()
