"""`python -m ps`: the commands of the coordinator's and servers' side."""

import sys

from ps.cli import main

sys.exit(main())
