# The affdiv command: its commands, and what an error becomes. Exit codes: 0 done, 1 failed, 2 bad input.
from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import cyclopts

import affine_divergence
from affine_divergence.cli._progress import tell
from affine_divergence.cli.bench import bench
from affine_divergence.cli.data import data
from affine_divergence.cli.diagnose import diagnose
from affine_divergence.cli.export import export
from affine_divergence.cli.plan import plan
from affine_divergence.cli.report import report
from affine_divergence.cli.reproduce import reproduce
from affine_divergence.cli.resume import resume
from affine_divergence.cli.rule import rule
from affine_divergence.cli.run import run
from affine_divergence.cli.status import status
from affine_divergence.cli.theory import theory
from affine_divergence.cli.verdicts import verdicts
from affine_divergence.diagnostics._visible import visible
from affine_divergence.lab.errors import BadInputError, StudyFailedError

app = cyclopts.App(
    name="affdiv",
    help="The affine divergence: diagnose a model, run a study, report it, measure the layers.",
    version=affine_divergence.__version__,
    result_action="return_value",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
app.command(reproduce)
app.command(run)
app.command(resume)
app.command(status)
app.command(plan)
app.command(report)
app.command(export)
app.command(verdicts)
app.command(diagnose)
app.command(data)
app.command(bench)
app.command(theory)
app.command(rule)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    _open_output()
    sys.exit(call(arguments))


def call(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        app(sys.argv[1:] if arguments is None else list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except (BadInputError, cyclopts.CycloptsError) as error:
        return _say(error, 2)
    except StudyFailedError as error:
        return _say(error, 1)
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", ())  # of commands that store what they have finished, how to go on
        way_out = f"what was finished is stored, {'; '.join(notes)}" if notes else "the same command starts anew"
        tell(f"affdiv: interrupted; {way_out}")
        return getattr(error, "exit_code", 130)
    except OSError as error:
        if error.filename is not None:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (or Python tries to write the rest when it ends)
        if not isinstance(error, BrokenPipeError):  # which says that the reader has seen enough
            tell(f"affdiv: the output cannot be written: {error.strerror}")
        return 1
    return 0


def _open_output() -> None:
    # Output in an encoding without the letters, as cp1252 has no ─, gets question marks; where it is closed nobody wants any.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (and no file of a study gets its number)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _say(error: Exception, code: int) -> int:
    tell(visible(f"affdiv: {' '.join('; '.join([str(error), *getattr(error, '__notes__', ())]).split())}"))
    return code
