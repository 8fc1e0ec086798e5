"""`python -m benchmarks.architectures`."""

from benchmarks.architectures.main import main

main()
