"""`python -m benchmarks.attacks`."""

from benchmarks.attacks.main import main

main()
