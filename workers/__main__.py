"""`python -m workers`: the same as `psctl`."""

import sys

from workers.cli import main

sys.exit(main())
