"""`python -m jqinject`: the main job; with `list`, `explain` or `show`, the ready-made quantizers; with `inspect`, a
checkpoint."""

import sys

from jqinject.catalogue.catalogue_command import COMMANDS
from jqinject.catalogue.catalogue_command import main as catalogue
from jqinject.demo.cli import main as demo
from jqinject.formats.contents import main as inspect


def main() -> int:
    """Run what the first argument names.

    Returns:
        The exit status.
    """
    arguments = sys.argv[1:]
    if arguments[:1] == ["inspect"]:
        return inspect(arguments[1:])
    return catalogue(arguments) if arguments[:1] and arguments[0] in COMMANDS else demo(arguments)


if __name__ == "__main__":
    sys.exit(main())
