"""`python -m benchmarks.soak`."""

from benchmarks.soak.main import main

main()
