"""Entry point of `python -m examples.gpt`."""

import sys

from examples.gpt.cli import main

sys.exit(main())
