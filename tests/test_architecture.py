# The package's shape: which part may import which, what a file is called, what it says first, what loads when.
from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import affine_divergence

ROOT = Path(affine_divergence.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
every_file = pytest.mark.parametrize("path", FILES, ids=NAMES)

# A part may import itself and the parts of lower rank; parts of one rank do not know each other.
RANK = {
    **{"functional": 0, "gradient": 1, "kernels": 1, "nn": 2, "surgery": 3, "diagnostics": 3},
    "init": 4,  # calibration runs a model as a diagnosis does
    **{"lab": 5, "cli": 6, "integrations": 7},
}
ALONE = {*sys.stdlib_module_names, "torch", "numpy", "affine_divergence"}
CORE = {part for part, rank in RANK.items() if rank < RANK["lab"]}


# Packages of an extra that a file of the core imports when its functions are called, never when it is imported itself.
WHEN_CALLED = {
    "diagnostics/_axes.py": {"matplotlib"},
    "diagnostics/_frame.py": {"polars"},
    "diagnostics/_page.py": {"jinja2"},
    "diagnostics/_scatter.py": {"matplotlib"},
    "diagnostics/_style.py": {"matplotlib"},
}


def _part(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else None


def _imported(path: Path, *, type_checking: bool, when_called: bool = True) -> Iterator[str]:
    """The absolute names of all modules that a file imports, anywhere in it, or outside its functions only."""
    package = ("affine_divergence", *path.relative_to(ROOT).parts[:-1])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    if not type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                skipped.update(n for statement in node.body for n in ast.walk(statement))
    if not when_called:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                skipped.update(n for statement in node.body for n in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@every_file
def test_a_part_imports_only_parts_below_it(path: Path) -> None:
    part = _part(path)
    if part is None:
        assert path.name == "__init__.py", f"{path.name} belongs to no part"
        return
    assert part in RANK, f"{part} has no place in the order of imports"
    for name in _imported(path, type_checking=True):
        if not name.startswith("affine_divergence"):
            continue
        other = name.split(".")[1] if "." in name else None
        if other in RANK:
            assert other == part or RANK[other] < RANK[part], f"{part} must not import {other}: {name}"
        else:
            assert part not in CORE, f"{part} must not import the top package, which is above it: {name}"


@every_file
def test_the_core_needs_torch_and_numpy_alone(path: Path) -> None:
    if _part(path) in CORE or _part(path) is None:
        needed = {name.split(".")[0] for name in _imported(path, type_checking=False, when_called=False)}
        assert needed <= ALONE
        at_all = {name.split(".")[0] for name in _imported(path, type_checking=False)}
        assert at_all - ALONE == WHEN_CALLED.get(path.relative_to(ROOT).as_posix(), set())


def test_importing_the_diagnostics_imports_no_package_of_an_extra() -> None:
    extra = set().union(*WHEN_CALLED.values())
    modules = [f"affine_divergence.diagnostics.{path.stem}" for path in (ROOT / "diagnostics").glob("_*.py") if path.stem != "__init__"]
    code = f"import sys, {', '.join(modules)}; print(sorted({extra!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_top_package_imports_nothing_of_its_own_at_import() -> None:
    assert {name.split(".")[0] for name in _imported(ROOT / "__init__.py", type_checking=False)} <= sys.stdlib_module_names


def test_importing_the_package_imports_no_torch_and_no_numpy() -> None:
    code = "import sys, affine_divergence; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_lazy_name_resolves_in_a_fresh_process_whatever_comes_first() -> None:
    # Torch, which takes most of the time, is imported once; what is tested is this package alone.
    code = """
import os, sys, torch
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        import affine_divergence as ad
        os._exit(getattr(ad, name) is not getattr(ad, name) or name not in dir(ad))
    assert os.waitpid(child, 0)[1] == 0, name
"""
    subprocess.run([sys.executable, "-c", code, *affine_divergence.__all__], check=True)


def test_lazy_names_are_the_objects_of_their_modules() -> None:
    from affine_divergence import diagnostics, functional, gradient, init, nn

    assert affine_divergence.functional is functional
    assert affine_divergence.gradient is gradient
    assert affine_divergence.init is init
    assert affine_divergence.nn is nn
    assert affine_divergence.matching_lr is diagnostics.matching_lr
    assert affine_divergence.param_groups is init.param_groups
    assert set(affine_divergence.__all__) <= set(dir(affine_divergence))


def test_an_unknown_name_is_an_attribute_error_that_says_which() -> None:
    with pytest.raises(AttributeError, match="module 'affine_divergence' has no attribute 'afine_like_linear'"):
        affine_divergence.afine_like_linear  # noqa: B018
    assert not hasattr(affine_divergence, "__wrapped__")


@every_file
def test_no_file_is_named_for_what_it_might_hold(path: Path) -> None:
    for name in path.relative_to(ROOT).with_suffix("").parts:
        assert name.strip("_") not in {"utils", "util", "helpers", "helper", "common", "misc"}


@every_file
def test_the_first_line_says_what_lives_there(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    text = first.removeprefix("#").strip('" ')
    assert first.startswith(("# ", '"""')), f"{first!r} is neither a comment nor a docstring"
    assert len(text.split()) >= 3, f"{first!r} says little"


def _public() -> Iterator[tuple[str, object]]:
    """Every name that an __init__ exports, by `X as X` or in __all__."""
    for path in FILES:
        if path.name != "__init__.py":
            continue
        module = importlib.import_module(".".join(["affine_divergence", *path.parent.relative_to(ROOT).parts]))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        aliases = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        exported = {alias.name for alias in aliases if alias.name == alias.asname} | set(getattr(module, "__all__", ()))
        yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in sorted(exported))


def test_every_public_class_and_function_has_a_docstring_of_its_own() -> None:
    public = dict(_public())
    assert "affine_divergence.nn.L2Norm" in public
    lacking = []
    for name, value in public.items():
        if inspect.isclass(value) or inspect.isfunction(value):
            inherited = any(value.__doc__ is base.__doc__ for base in value.__mro__[1:]) if inspect.isclass(value) else False
            if not value.__doc__ or inherited:
                lacking.append(name)
    assert lacking == []


def test_every_public_name_of_the_core_has_a_doctest_with_a_result() -> None:
    core = {name: value for name, value in _public() if name.split(".")[1] in CORE and not inspect.ismodule(value)}
    assert "affine_divergence.functional.affine_like_linear" in core
    parser = doctest.DocTestParser()
    lacking = [name for name, value in core.items() if not any(example.want for example in parser.get_examples(value.__doc__ or ""))]
    assert lacking == []


def test_the_parts_of_the_core_export_what_they_promise() -> None:
    public = set(dict(_public()))
    promised = {
        "functional.affine_like_linear",
        "functional.norm_like_linear",
        "functional.patch_sqnorm",
        *(f"functional.{kind}_like_conv{of}{dims}d" for kind in ("affine", "norm") for of in ("", "_transpose") for dims in (1, 2, 3)),
        *(f"nn.PatchNormConv{of}{dims}d" for of in ("", "Transpose") for dims in (1, 2, 3)),
        *(f"gradient.{kind}_corrected_{of}" for kind in ("sample", "batch") for of in ("linear", "conv1d", "conv2d", "conv3d")),
        *(f"nn.BatchCorrected{of}" for of in ("Linear", "Conv1d", "Conv2d", "Conv3d")),
        *(f"nn.SampleCorrected{of}" for of in ("Linear", "Conv1d", "Conv2d", "Conv3d")),
        "nn.AffineLikeLinear",
        "nn.NormLikeLinear",
        "nn.L2Norm",
        *(f"diagnostics.{name}" for name in ("Diagnosis", "Monitor", "diagnose", "load", "matching_lr")),
        "Monitor",
        "diagnose",
        *(f"init.{name}" for name in ("Calibration", "calibrate_", "hidden_gain_", "param_groups", "signal_")),
        "matching_lr",
        "param_groups",
    }
    assert {f"affine_divergence.{name}" for name in promised} <= public
