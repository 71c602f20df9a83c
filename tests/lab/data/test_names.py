# What a user writes after --data, and what importing the names costs.
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from affine_divergence.lab.data import NAMES, parse_source
from affine_divergence.lab.errors import BadInputError


@pytest.mark.parametrize("name", NAMES)
def test_a_name_alone_has_no_path(name: str) -> None:
    assert parse_source(name) == (name, None)


def test_the_path_is_everything_after_the_first_equals_sign() -> None:
    assert parse_source("cifar10=/data/a=b c") == ("cifar10", Path("/data/a=b c"))


def test_a_tilde_after_the_equals_sign_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert parse_source("cifar10=~/images") == ("cifar10", Path("/somewhere/images"))
    assert parse_source("cifar10=~nobody-of-this-name/images") == ("cifar10", Path("~nobody-of-this-name/images"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cifar", r"unknown data set 'cifar': wanted one of digits, cifar10, cifar10-jpeg, fashion-mnist; did you mean cifar10\?"),
        ("", r"unknown data set '': wanted one of digits"),
        ("=/data", r"unknown data set ''"),
        ("Digits", r"unknown data set 'Digits': .*did you mean digits\?"),
        ("cifar10=", r"a path was wanted after '=', nothing came; write cifar10=PATH"),
        ("cifar10=  ", r"a path was wanted after '='"),
    ],
)
def test_a_wrong_source_is_bad_input(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        parse_source(text)


@pytest.mark.parametrize("names", ["NAMES, parse_source, Dataset", "load, locate, split_rows", "ARCHIVES, download, downloads_folder"])
def test_importing_it_imports_no_heavy_library(names: str) -> None:
    code = f"""
import sys
from affine_divergence.lab.data import {names}
print(sorted({{"torch", "sklearn", "polars", "PIL", "scipy", "jaxtyping"}} & set(sys.modules)))"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    import affine_divergence.lab.data as data

    assert {"load", "make_splits", "Part", "Splits", "Dataset"} <= set(dir(data))
    with pytest.raises(AttributeError, match="has no attribute 'loda'"):
        data.loda  # noqa: B018
