"""`python -m stepkeeper` is the command `stepkeeper`."""

import sys

from stepkeeper.entry import main

sys.exit(main())
