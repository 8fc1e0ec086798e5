"""`python -m benchmarks.gpu`."""

import sys

from benchmarks.gpu.main import main

sys.exit(main())
