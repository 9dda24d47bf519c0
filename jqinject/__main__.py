"""`python -m jqinject`: the main job."""

import sys

from jqinject.demo.cli import main

if __name__ == "__main__":
    sys.exit(main())
