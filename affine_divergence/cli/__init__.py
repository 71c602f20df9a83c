# The affdiv command: one small module a command.
from __future__ import annotations

import sys


def command() -> None:
    """The entry point: an interruption while the commands are imported is told like any other."""
    try:
        from affine_divergence.cli.main import main
    except KeyboardInterrupt:
        print("affdiv: interrupted before anything was begun", file=sys.stderr)
        sys.exit(130)
    main()
