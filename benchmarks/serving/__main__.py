"""`python -m benchmarks.serving`."""

from benchmarks.serving.main import main

main()
