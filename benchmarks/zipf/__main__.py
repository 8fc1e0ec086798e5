"""`python -m benchmarks.zipf`."""

from benchmarks.zipf.main import main

main()
