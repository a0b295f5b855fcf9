"""`python -m stepkeeper` is the command `stepkeeper`."""

import sys

from stepkeeper.cli import main

sys.exit(main())
