# affdiv diagnose: what it takes, what it says of what it cannot take, what it writes.
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from affine_divergence import diagnose
from affine_divergence.cli._batch import Batch
from affine_divergence.cli._setup import on_device
from affine_divergence.cli.main import call
from affine_divergence.diagnostics import load
from affine_divergence.lab.examples import EXAMPLES, example

OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x, scale=None):
        if x.shape[1] == 5:
            raise RuntimeError("five are\\ntoo many")
        return self.body(x if scale is None else x * scale)

def make_model():
    return Own()

def make_batch():
    rows = torch.arange(24.0).reshape(6, 4) / 10
    return rows, torch.tensor([0, 1, 2, 0, 1, 2])

def keyword_batch():
    rows, targets = make_batch()
    return {"x": rows, "scale": torch.tensor(2.0), "targets": targets}

def wide_batch():
    return torch.ones(6, 5), torch.zeros(6, dtype=torch.long)

def lonely_batch():
    return torch.ones(6, 4)

def half_a_batch():
    return {"targets": torch.ones(6, 4)}

def three():
    return 1, 2, 3

def number():
    return 3

def fails():
    raise KeyError("weights")

def stops():
    raise SystemExit(3)

def loss(output, targets):
    return nn.functional.cross_entropy(output, targets)

def refuses(output, targets):
    raise ValueError("no loss for you")

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)

def no_optimizer(parameters):
    return list(parameters)

model = make_model()
mean = nn.CrossEntropyLoss
NUMBER = 3
"""

LEAVING = """
import sys
import torch
from torch import nn
from own import Own, make_batch

class Forward(Own):
    def forward(self, x):
        sys.exit()

class Backward(Own):
    def forward(self, x):
        out = self.body(x)
        out.register_hook(lambda g: sys.exit(3))
        return out

class Moved(Own):
    def _apply(self, fn, recurse=True):
        raise MemoryError("too much")

class Rows(torch.Tensor):
    def to(self, *args, **kwargs):
        raise OSError(28, "No space")

def rows():
    return torch.ones(6, 4).as_subclass(Rows), make_batch()[1]

def loss(output, targets):
    sys.exit("enough")

def sgd(parameters):
    class Leaving(torch.optim.SGD):
        def step(self):
            sys.exit(0)
    return Leaving(parameters, lr=0.1)

def __getattr__(name):
    if name == "away":
        sys.exit(0)
    raise AttributeError(name)
"""


def step(model: str = "own.py:make_model", batch: str = "own.py:make_batch", loss: str = "cross_entropy") -> list[str]:
    return [model, "--batch", batch, "--loss", loss]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Modules that are imported from the folder, and its place in the path, are gone after the test.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    Path("own.py").write_text(OWN)
    Path("leaving.py").write_text(LEAVING)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert call(["diagnose", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def one_step(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command found, without a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("affine_divergence.diagnostics._page.write_page", lambda found, path: None)
        said([*arguments, "--out", "out"], capsys)
    (found,) = load("out/diagnosis.jsonl")
    return found


def test_help_and_the_list_of_ways_import_no_torch() -> None:
    code = "import sys; from affine_divergence.cli.main import call; code = call(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    for arguments in (["diagnose"], ["diagnose", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        for name in EXAMPLES:
            assert name in done.stdout


MODELS = [
    ("own.py", "MODEL is 'own.py'; write package.module:name or path/to/file.py:name"),
    ("nowhere.py:make_model", "MODEL: there is no file nowhere.py"),
    ("nowhere.models:make", "MODEL: there is no module nowhere, neither in the current folder nor installed"),
    ("own.models:make", "MODEL: there is no module own.models, neither"),
    ("own.py:makemodel", "MODEL: own.py has no makemodel; it has Own, fails,"),
    ("own.py:NUMBER", "MODEL own.py:NUMBER is of type int; wanted is a function"),
    ("own.py:number", "MODEL own.py:number gives a value of type int; wanted is a torch.nn.Module"),
    ("own.py:fails", "MODEL own.py:fails raised KeyError: 'weights' ({folder}/own.py:42 in fails)"),
    ("own.py:stops", "MODEL own.py:stops raised SystemExit: 3 ({folder}/own.py:45 in stops)"),
    ("torch.nn:Linear", "MODEL torch.nn:Linear raised TypeError: Linear.__init__() missing 2 required"),
    ("broken.py:make_model", "running broken.py raised ZeroDivisionError: division by zero ({folder}/broken.py:2 in"),
    ("wrong.py:make_model", "MODEL: running wrong.py raised SyntaxError: invalid syntax ({folder}/wrong.py:1)"),
    ("lacking:make_model", "importing lacking raised ModuleNotFoundError: No module named 'nowhere' ({folder}/lacking.py:1"),
]
BATCHES = [
    ("batch", "--batch is 'batch'; give a file .pt or .npz, or a function package.module:make_batch"),
    ("nowhere.pt", "--batch nowhere.pt: No such file or directory"),
    ("nowhere.npz", "--batch nowhere.npz: No such file or directory"),
    ("text.pt", "--batch text.pt holds more than tensors, tuples, lists and dicts, or is no file of torch.save"),
    ("empty.pt", "--batch empty.pt cannot be read as a file of torch.save"),
    ("cut.pt", "--batch cut.pt cannot be read as a file of torch.save"),
    ("module.pt", "--batch module.pt holds more than tensors"),
    ("text.npz", "--batch text.npz cannot be read as numbers of numpy.savez"),
    ("array.npz", "--batch array.npz cannot be read as numbers of numpy.savez: it is one array, not an archive"),
    ("objects.npz", "--batch objects.npz cannot be read as numbers of numpy.savez: Object arrays cannot be loaded"),
    ("names.npz", "--batch names.npz cannot be read as numbers of numpy.savez: can't convert"),
    ("own.py:three", "--batch own.py:three has 3 parts; wanted are two: inputs and targets"),
    ("own.py:number", "--batch own.py:number is of type int; wanted is a tensor, a pair (inputs, targets) or a dict"),
    ("own.py:half_a_batch", "--batch own.py:half_a_batch holds no inputs; its entries are: targets"),
    ("long.npz", "--batch long.npz cannot be read as numbers of numpy.savez: labels holds 18446744073709551615, which int64 has not"),
    ("large.npz", "--batch large.npz cannot be read as numbers of numpy.savez: inputs holds 1e+300, which float32 has not"),
    ("mixed.npz", "--batch mixed.npz holds inputs and also scale; give all inputs as keywords of the model"),
    ("own.py:fails", "--batch own.py:fails raised KeyError: 'weights'"),
    ("own.py:lonely_batch", "compares the output with targets, --batch own.py:lonely_batch has none"),
    ("own.py:wide_batch", "the step raised RuntimeError: five are too many ({folder}/own.py:12 in forward)"),
]
OTHERS = [
    (["--out", "x"], "there is no MODEL; give package.module:make_model or file.py:make_model, or an --example"),
    (["own.py:make_model"], "the model needs a --batch: a file .pt or .npz, or a function package.module:make_batch"),
    (
        step(loss="crossentropy"),
        "--loss crossentropy is no loss of (input, target) in torch.nn.functional; there are binary_cross_entropy,",
    ),
    (step()[:3], "--batch own.py:make_batch has targets, which only a --loss compares with; give one"),
    (["own.py:make_model", "--batch", "own.py:lonely_batch"], "the model's output, a Tensor, has no loss; give --loss (and targets)"),
    (step(loss="relu"), "--loss relu is no loss of (input, target)"),
    (step(loss="own.py:NUMBER"), "--loss own.py:NUMBER is of type int; wanted is a function"),
    (step(loss="own.py:refuses"), "the step raised ValueError: no loss for you ({folder}/own.py:51 in refuses)"),
    ([*step(), "--optimizer", "Adamw"], "--optimizer Adamw is not in torch.optim; there are ASGD,"),
    ([*step(), "--optimizer", "Optimizer"], "--optimizer Optimizer is not in torch.optim"),
    ([*step(), "--optimizer", "Muon"], "--optimizer Muon raised ValueError: Muon only supports 2D parameters"),
    ([*step(), "--optimizer", "own.py:no_optimizer"], "gives a value of type list; wanted is a torch.optim.Optimizer"),
    ([*step(), "--optimizer", "own.py:fails"], "--optimizer own.py:fails raised TypeError: fails() takes 0 positional arguments"),
    ([*step(), "--optimizer", "own.py:sgd", "--lr", "0.1"], "--optimizer own.py:sgd sets its own learning rate; leave out --lr"),
    ([*step(), "--lr", "0"], "--lr must be positive and finite, got 0"),
    ([*step(), "--lr", "-0.1"], "--lr must be positive and finite, got -0.1"),
    ([*step(), "--lr", "nan"], "--lr must be positive and finite, got nan"),
    ([*step(), "--lr", "fast"], "fast"),
    ([*step(), "--device", "abacus"], "--device abacus is no device"),
    ([*step(), "--example", "mlp"], "--example says what to diagnose; leave out MODEL and --batch and --loss, or --example"),
    ([*step(), "--rate", "1"], "--rate"),
    (["--example", "rnn"], "there is no example rnn; there are: mlp, convnet, transformer"),
    (["--from", "nowhere.jsonl"], "--from nowhere.jsonl: No such file or directory"),
    (["--from", "own.py"], "--from own.py: "),
    (["--from", "empty.pt"], "--from empty.pt holds no diagnosis that was written to its end"),
    (["--from", "a.jsonl", "--lr", "1"], "--from says what to diagnose; leave out --lr, or --from"),
    (["--from", "a.jsonl", "--no-counterfactual"], "leave out --no-counterfactual, or --from"),
    (["--from", "a.jsonl", "--example", "mlp"], "leave out --example, or --from"),
    (["--example", "mlp", "--out", "own.py/x", "--no-counterfactual"], "cannot write to own.py/x: Not a directory; name another folder"),
]


LEFT = [
    (step("leaving.py:Forward"), "the step raised SystemExit ({folder}/leaving.py:9 in forward)"),
    (step("leaving.py:Backward"), "the step raised SystemExit: 3 ({folder}/leaving.py:14 in <lambda>)"),
    (step(loss="leaving.py:loss"), "the step raised SystemExit: enough ({folder}/leaving.py:29 in loss)"),
    ([*step(), "--optimizer", "leaving.py:sgd"], "the step raised SystemExit: 0 ({folder}/leaving.py:34 in step)"),
    (step("leaving.py:Moved"), "MODEL, moved to cpu, raised MemoryError: too much ({folder}/leaving.py:19 in _apply)"),
    (step(batch="leaving.py:rows"), "--batch, moved to cpu, raised OSError: [Errno 28] No space ({folder}/leaving.py:23 in to)"),
    (step("leaving.py:away"), "MODEL: leaving.py:away raised SystemExit: 0 ({folder}/leaving.py:39 in __getattr__)"),
    (step("leaving.py:here"), "MODEL: leaving.py has no here; it has"),
    ([*step(), "--include"], "--include wants a pattern of names of modules, or several; got none"),
    ([*step(), "--include", "--device", "cpu"], "--include wants a pattern"),
    ([*step(), "--include", "body", ""], "--include wants a pattern of names of modules, or several; got an empty one"),
    ([*step(), "--include", "\x1b[31m"], r"\x1b[31m"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [*((step(model=name), said) for name, said in MODELS), *((step(batch=name), said) for name, said in BATCHES), *OTHERS, *LEFT],
)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.py").write_text("# broken\nratio = 1 / 0\n")
    Path("wrong.py").write_text("def (:\n")
    Path("lacking.py").write_text("import nowhere\n")
    for name in ("text.pt", "text.npz"):
        Path(name).write_text("neither tensors nor arrays")
    Path("empty.pt").write_bytes(b"")
    torch.save(torch.ones(100), "whole.pt")
    Path("cut.pt").write_bytes(Path("whole.pt").read_bytes()[:300])
    torch.save(nn.Linear(2, 2), "module.pt")
    np.save("array.npy", np.ones(3))
    Path("array.npy").rename("array.npz")
    np.savez("objects.npz", inputs=np.array([{}, []], dtype=object))
    np.savez("names.npz", inputs=np.array(["a", "b"]))
    np.savez("long.npz", inputs=np.ones((6, 4)), labels=np.array([1, 2**64 - 1, 2**63], dtype="uint64"))
    np.savez("large.npz", inputs=np.array([np.inf, 1.0, 1e300]))
    np.savez("mixed.npz", inputs=np.ones((6, 4)), scale=np.ones(6))
    assert call(["diagnose", *arguments]) == 2
    out, error = capsys.readouterr()
    assert message.format(folder=tmp_path) in error
    assert error.startswith("affdiv: ")
    assert error.endswith("\n")
    assert error[:-1].isprintable()
    if "--out" not in arguments:
        assert out == ""


def test_the_numbers_are_those_of_diagnose(capsys: pytest.CaptureFixture[str]) -> None:
    found = one_step([*step(), "--optimizer", "Adam", "--lr", "0.01"], capsys)
    namespace: dict[str, Any] = {"__name__": "own"}
    exec(OWN, namespace)
    torch.manual_seed(0)
    model = namespace["make_model"]()
    wanted = diagnose(
        model, *namespace["make_batch"](), nn.functional.cross_entropy, optimizer=torch.optim.Adam(model.parameters(), lr=0.01)
    )
    assert list(found.rows) == list(wanted.rows)
    assert found.rows[0].multiplier_median != found.rows[0].multiplier_median_plain


@pytest.mark.parametrize("arguments", [step(), ["--example", "transformer", "--no-counterfactual"]], ids=["own", "dropout"])
def test_the_command_prints_the_same_numbers_every_time(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    first = said(arguments, capsys)
    torch.manual_seed(2)
    assert said(arguments, capsys) == first


def test_a_batch_is_the_same_from_a_function_a_pt_and_an_npz(capsys: pytest.CaptureFixture[str]) -> None:
    rows, labels = torch.arange(24.0).reshape(6, 4) / 10, torch.tensor([0, 1, 2, 0, 1, 2])
    torch.save((rows, labels), "pair.pt")
    torch.save({"inputs": rows, "targets": labels}, "dict.pt")
    torch.save({"x": rows, "targets": labels}, "keyword.pt")
    np.savez("batch.npz", inputs=rows.double().numpy(), targets=labels.int().numpy())
    np.savez("keyword.npz", x=rows.double().numpy(), targets=labels.numpy().astype("uint16"))
    wanted = one_step(step(), capsys).rows
    for name in ("pair.pt", "dict.pt", "keyword.pt", "batch.npz", "keyword.npz"):
        assert one_step(step(batch=name), capsys).rows == wanted, name


def test_keyword_inputs_all_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    plain, doubled = (one_step(step(batch=f"own.py:{name}"), capsys).rows[0] for name in ("make_batch", "keyword_batch"))
    assert doubled.self_term_median - 1 == pytest.approx(4 * (plain.self_term_median - 1))


def test_a_module_by_import_path_is_run_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = one_step(["own:model", "--batch", "own:make_batch", "--loss", "own:loss", "--optimizer", "own:sgd"], capsys)
    assert [row.module for row in found.rows] == ["body"]
    assert "own" in sys.modules
    by_class = one_step(["own:model", "--batch", "own:make_batch", "--loss", "own:mean", "--optimizer", "own:sgd"], capsys)
    assert by_class.rows == found.rows


def test_a_file_imports_from_its_own_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("models").mkdir()
    Path("own.py").rename("models/beside.py")
    Path("models/net.py").write_text("from beside import make_batch, make_model\n")
    found = one_step(step("models/net.py:make_model", "models/net.py:make_batch"), capsys)
    assert [row.module for row in found.rows] == ["body"]


def test_without_a_loss_the_output_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("with_loss.py").write_text(
        """
import types, own

class Model(own.Own):
    def forward(self, x, labels):
        return types.SimpleNamespace(loss=own.loss(self.body(x), labels))

def make_batch():
    rows, labels = own.make_batch()
    return {"x": rows, "labels": labels}
"""
    )
    found = one_step(["with_loss:Model", "--batch", "with_loss:make_batch"], capsys)
    assert found.rows == one_step(step(), capsys).rows


def test_include_measures_what_it_names_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = one_step(["--example", "mlp", "--include", "1", "7", "--no-counterfactual"], capsys)
    assert [row.module for row in found.rows] == ["1", "7"]
    assert found.counterfactual == ()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_layer_with_weights_of_an_example_is_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = one_step(["--example", name, "--optimizer", "Adam", "--lr", "0.001"], capsys)
    skipped = {entry.type for entry in found.coverage if entry.status == "skipped"}
    assert skipped <= {"BatchNorm2d", "LayerNorm", "_Transformer"}, found.coverage
    assert {"mlp": 4, "convnet": 4, "transformer": 2 + 2 * (4 + 2)}[name] == len(found.rows)
    assert all(check.ok for check in found.checks)
    assert found.counterfactual


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_the_same_at_every_call_and_leaves_the_random_numbers_alone(name: str) -> None:
    first = example(name)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    second = example(name)
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.inputs, second.inputs)
    assert first.inputs.shape == (128, 1, 8, 8)
    assert first.loss_fn(first.model(first.inputs), first.targets).item() == pytest.approx(np.log(10), abs=0.3)


def test_the_page_is_written_and_written_again_from_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    printed = said([*step(), "--out", "first"], capsys)
    assert printed.endswith("page: first/diagnosis.html\n")
    again = said(["--from", "first/diagnosis.jsonl", "--out", "second"], capsys)
    assert again.replace("second", "first") == printed
    assert Path("second/diagnosis.html").read_text() == Path("first/diagnosis.html").read_text()
    assert [path.name for path in Path("second").iterdir()] == ["diagnosis.html"]
    for line in Path("first/diagnosis.jsonl").read_text().splitlines():
        json.loads(line)


def test_the_file_of_a_monitor_shows_its_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    from affine_divergence import Monitor

    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every=2, path="monitor.jsonl") as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
    printed = said(["--from", "monitor.jsonl", "--out", "out"], capsys)
    assert printed == f"{monitor.last}\npage: out/diagnosis.html\n"
    assert len(load("monitor.jsonl")) > 1


def test_a_batch_is_moved_in_the_classes_that_it_is_of() -> None:
    class Attributes(dict[str, Any]):
        __getattr__ = dict.__getitem__

    tensor = torch.ones(2)
    there = on_device(torch.nn.Linear(2, 1), Batch(Attributes(x=tensor), tensor), "meta")
    assert there.inputs.x.is_meta
    assert there.targets is there.inputs.x
    assert not tensor.is_meta
