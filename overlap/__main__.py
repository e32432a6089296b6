"""`python -m overlap`: the same as the command `overlap`."""

import sys

from .cli import main

sys.exit(main())
