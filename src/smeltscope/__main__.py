"""`python -m smeltscope probe ...` and `python -m smeltscope smelt ...`, for torchrun and no scripts."""

import sys

from smeltscope.cli import main

sys.exit(main())
