"""`python -m examples.llama`."""

import sys

from examples.llama.cli import main

if __name__ == "__main__":
    sys.exit(main())
