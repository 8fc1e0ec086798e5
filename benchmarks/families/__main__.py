"""`python -m benchmarks.families`."""

from benchmarks.families.main import main

main()
