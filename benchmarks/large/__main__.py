"""`python -m benchmarks.large`."""

from benchmarks.large.main import main

if __name__ == "__main__":
    main()
