# Grid files: what they mean, and the one line that says what is wrong with one.
from __future__ import annotations

from pathlib import Path

import pytest
from makers import TINY, TUNED, grid

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.grid import parse_grid, read_grid
from affine_divergence.lab.tuning import plan


def test_an_untuned_grid_is_the_product_of_its_axes() -> None:
    trials = plan(grid(TINY), {}).missing
    assert len(trials) == len(set(trials)) == 2 * 2 * 3
    assert {(t.method, t.learning_rate, t.seed) for t in trials} == {
        (m, r, s) for m in ("none", "affine-like") for r in (0.03, 0.3) for s in (0, 1, 2)
    }
    assert all(t.epochs == 2 and t.steps is None and t.role == "evaluation" for t in trials)


def test_a_single_value_may_stand_without_brackets() -> None:
    assert grid(TINY.replace("[8]", "8").replace('["tanh"]', '"tanh"')) == grid(TINY)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("width = [8]", "witdh = [8]", "grid.witdh is not a field here; the fields are method, width"),
        ("width = [8]", "", "grid.width: field required"),
        ("width = [8]", "width = [0]", "grid.width: input should be greater than or equal to 1, got 0"),
        ("width = [8]", 'width = ["8"]', "grid.width: input should be a valid integer, got '8'"),
        ("width = [8]", "width = []", "grid.width: wanted at least one value, got none"),
        ("width = [8]", "width = [8, 8]", "width holds a value twice"),
        ('"affine-like"]', '"affinelike"]', "grid.method: input should be 'none', 'batch-norm'"),
        ("0.3]", "-0.3]", "grid.learning_rate: input should be greater than 0, got -0.3"),
        ("0.3]", "inf]", "grid.learning_rate"),
        ("[0.03, 0.3]", "[true]", "grid.learning_rate: input should be a valid number, got True"),
        ("[0.03, 0.3]", '["0.1"]', "grid.learning_rate: input should be a valid number, got '0.1'"),
        ("width = [8]", "width = [99999999999999999999]", "grid.width"),
        ("width = [8]", f"width = {'[' * 2000}{']' * 2000}", "is not a TOML file"),
        ("epochs = 2", "", "give either epochs or steps"),
        ("epochs = 2", "epochs = 2\nsteps = 9", "give either epochs or steps"),
        ("epochs = 2", "epochs = 2\nposition = 'after'", "grid.position is not a field here"),
        ('study = "tiny"', 'study = "../x"', "study"),
        ("[grid]", "[grid", "is not a TOML file"),
        ("seed = [0, 1, 2]", "seed = [true]", "grid.seed"),
    ],
)
def test_a_wrong_grid_file_is_told_in_one_line_that_names_the_field(old: str, new: str, said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        grid(TINY.replace(old, new))
    assert said in str(caught.value)
    assert "grid.toml" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "after validation" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds = [10, 11, 12]", "seeds = [1, 10]", r"seeds [1] are both for tuning and for evaluation"),
        ("seeds = [10, 11, 12]", "seeds = [10, 10]", "twice"),
        ("[0.01, 0.03, 0.1, 0.3, 1.0]", "[0.1, 0.03, 0.3]", "ascend"),
        ("[0.01, 0.03, 0.1, 0.3, 1.0]", "[0.1, 0.3]", "at least three"),
    ],
)
def test_a_grid_that_cannot_be_tuned_says_why(old: str, new: str, said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        grid(TUNED.replace(old, new))
    assert said in str(caught.value)


BLOCK = """
[[grid]]
method = "none"
width = 8
depth = 2
activation = "tanh"
batch_size = 32
learning_rate = [0.03, 0.3]
seed = [2, 3]
epochs = 2
"""
FIXED = BLOCK.replace("learning_rate = [0.03, 0.3]", "rate_from_batch_size = 32")
BLOCKS = TINY.replace("[grid]", "[[grid]]")


def test_the_trials_of_several_blocks_are_joined_and_a_shared_cell_is_tested_with_the_seeds_of_both() -> None:
    joined = grid(BLOCKS + BLOCK)
    assert {series.cell.method: series.seeds for series in joined.series()} == {"none": (0, 1, 2, 3), "affine-like": (0, 1, 2)}
    trials = plan(joined, {}).missing
    assert len(trials) == len(set(trials)) == 2 * (4 + 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BLOCKS + BLOCK.replace("[0.03, 0.3]", "[0.03, 0.1]"), "with different learning_rate"),
        (BLOCKS + FIXED, "add a [tuning] table"),
        (BLOCKS + FIXED.replace("= 32\nseed", "= 64\nseed"), "no block tunes"),
        (BLOCKS + FIXED.replace("epochs", "learning_rate = 0.1\nepochs"), "give either learning_rate or rate_from_batch_size"),
        (TINY.replace("learning_rate = [0.03, 0.3]", ""), "give either learning_rate or rate_from_batch_size"),
        ("train_images = 0\n" + TINY, "train_images: input should be greater than or equal to 1, got 0"),
        ("grid = []\nstudy = 'x'\ndata = 'digits'", "grid: wanted at least one value, got none"),
        ("grid = 3\nstudy = 'x'\ndata = 'digits'", "grid: "),
        ("grid = [3]\nstudy = 'x'\ndata = 'digits'", "grid: "),
    ],
)
def test_blocks_that_do_not_go_together_are_told_in_one_line(text: str, said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        grid(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"missing\.toml: No such file"):
        read_grid(tmp_path / "missing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match=r"bytes\.toml"):
        read_grid(tmp_path / "bytes.toml")


def test_a_grid_of_more_than_a_million_trials_is_refused_before_it_is_built() -> None:
    seeds = ", ".join(str(i) for i in range(2000))
    rates = ", ".join(str(i + 1) for i in range(1000))
    with pytest.raises(BadInputError, match="4,000,000 trials"):
        grid(TINY.replace("[0, 1, 2]", f"[{seeds}]").replace("[0.03, 0.3]", f"[{rates}]"))


def test_every_embedded_and_recorded_grid_is_valid() -> None:
    root = Path(__file__).parents[2]
    files = [*root.glob("affine_divergence/lab/studies/*.toml"), *root.glob("examples/*.toml"), *root.glob("records/*/grid.toml")]
    assert len(files) >= 2
    for file in files:
        parse_grid(file.read_text(), file.name)


def test_the_32_convolutional_architectures_are_32_and_the_study_took_eight_of_them() -> None:
    root = Path(__file__).parents[2]
    found = []
    for file in ("examples/convolutional.toml", "records/convolutional/grid.toml"):
        cells = [cell for cell in parse_grid((root / file).read_text(), file).cells() if cell.batch_size == 32 and cell.epochs]
        found.append({(cell.architecture, cell.activation) for cell in cells})
    assert [len(architectures) for architectures in found] == [32, 8]
    assert found[1] < found[0]


def test_patterns_multiply_the_cells_and_methods_that_do_not_fit_are_refused() -> None:
    conv = TINY.replace("depth = [2]", 'depth = [2]\npattern = ["k3s2", "k5s2-k1s1"]')
    assert [cell.pattern for cell in grid(conv).cells()] == ["k3s2", "k3s2", "k5s2-k1s1", "k5s2-k1s1"]
    assert {cell.pattern for cell in grid().cells()} == {None}
    with pytest.raises(BadInputError, match="layer-norm is no method of convolutional nets"):
        grid(conv.replace('"none"', '"layer-norm"'))
    with pytest.raises(BadInputError, match="layer-norm-sample is no method of fully-connected nets"):
        grid(TINY.replace('"none"', '"layer-norm-sample"'))
    with pytest.raises(BadInputError, match=r"grid.toml: grid.pattern: kernels are odd"):
        grid(conv.replace("k3s2", "k4s2"))
