"""Makes ``python -m benchmarks``, in a checkout, run the cases."""

import sys

from benchmarks.run import main

sys.exit(main())
