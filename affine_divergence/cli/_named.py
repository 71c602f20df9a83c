# What a user names as module:name or file.py:name, and what of theirs raised, and where.
from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import affine_divergence
from affine_divergence.lab.errors import BadInputError

# Frames that are not the user's: this package's, the standard library's and those of installed packages, torch among them.
_OTHERS = (Path(affine_divergence.__file__).parent, *{Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def named(text: str, what: str) -> Any:
    """The object behind `module:name` or `file.py:name`; the current folder can be imported from, and the folder of the file."""
    source, _, name = text.rpartition(":")
    if not source or not name:
        raise BadInputError(f"{what} is {text!r}; write package.module:name or path/to/file.py:name")
    module = _from_file(Path(source), what) if source.endswith(".py") else _from_path(source, what)
    found: Any = module
    for part in name.split("."):
        with of_users(f"{what}: {text}"):  # a module may have a __getattr__
            if not hasattr(found, part):
                raise BadInputError(f"{what}: {source} has no {name}; {_there(module)}")
            found = getattr(found, part)
    return found


def called(function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """What a user's function returns; what it raises becomes bad input, with its place."""
    with of_users(what):
        return function(*arguments)


@contextmanager
def of_users(what: str) -> Iterator[None]:
    """In here code of the user's runs: what it raises becomes bad input, with its place. To end the command is not its business."""
    try:
        yield
    except BadInputError:
        raise
    except (Exception, SystemExit) as error:
        raise BadInputError(f"{what} raised {told(error)}") from error


def told(error: BaseException) -> str:
    """An exception's type and message, and the line of the user's own code that it came through last."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{text.partition(' (')[0]} ({error.filename}:{error.lineno})" if error.filename else text
    place = _users_place(error.__traceback__)
    return text if place is None else f"{text} ({place})"


def _users_place(trace: TracebackType | None) -> str | None:
    # The innermost line in a file of the user's.
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith("<") and not any(Path(frame.filename).is_relative_to(folder) for folder in _OTHERS):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return None


def _from_file(path: Path, what: str) -> ModuleType:
    full = path.expanduser().resolve()
    if not full.is_file():
        raise BadInputError(f"{what}: there is no file {path}")
    name = str(full.with_suffix(""))  # no module of another place is called so
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None  # as for every name that ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _importable(full.parent)
    sys.modules[name] = module
    try:
        with of_users(f"{what}: running {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_path(source: str, what: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise BadInputError(f"{what}: importing {source} raised {told(error)}") from error
        raise BadInputError(
            f"{what}: there is no module {error.name}, neither in the current folder nor installed; a file is path/to/file.py:name"
        ) from error
    except (Exception, SystemExit) as error:
        raise BadInputError(f"{what}: importing {source} raised {told(error)}") from error


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _there(module: ModuleType) -> str:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"]
    return f"it has {', '.join(sorted(own))}" if own else "it defines nothing"
