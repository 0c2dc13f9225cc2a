"""One model worker; see `cli`."""

import sys

from .program import run

if __name__ == "__main__":
    sys.exit(run())
