"""`python -m benchmarks.gpu_stub`; see `main`."""

import sys

from benchmarks.gpu_stub.main import main

sys.exit(main())
