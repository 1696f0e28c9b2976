"""``python -m kvshm``."""

import sys

from kvshm.cli import main

if __name__ == "__main__":
    sys.exit(main())
