# The callback of transformers' Trainer: the same diagnoses as a Monitor in a loop written out, the training as it was.
from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainerState, TrainingArguments

from affine_divergence import Monitor, diagnose
from affine_divergence.diagnostics import load
from affine_divergence.integrations.transformers import MonitorCallback

STEPS, ROWS = 5, 4


class Net(nn.Module):
    """Two layers and their loss, as the Trainer wants them; keeps the batches that it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen.append((x, labels))
        logits = self.second(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{"x": torch.randn(6, generator=generator), "labels": torch.randint(3, (), generator=generator)} for _ in range(STEPS * ROWS)]


def train(
    folder: Path, callbacks: list[Any], model: Net | None = None, checkpoint: str | None = None, **options: Any
) -> tuple[Net, Trainer]:
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    step = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    size = {"per_device_train_batch_size": ROWS, "num_train_epochs": 1, "dataloader_pin_memory": False}
    model = model or Net()
    arguments = TrainingArguments(str(folder / "out"), **{**quiet, **step, **size, **options})
    trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=callbacks)  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=checkpoint)
    return model, trainer


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks) for part in model.modules())


def test_its_diagnoses_are_those_of_a_monitor_in_a_loop(tmp_path: Path) -> None:
    tracked: list[tuple[int, dict[str, float]]] = []
    callback = MonitorCallback(2, path=tmp_path / "callback.jsonl", tracker=lambda values, step: tracked.append((step, dict(values))))
    trained, trainer = train(tmp_path, [callback])
    model, logged = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, 2, path=tmp_path / "loop.jsonl", tracker=lambda values, step: logged.append((step, dict(values)))):
        for x, labels in trained.seen:
            optimizer.zero_grad()
            model(x, labels)["loss"].backward()
            optimizer.step()
    found, wanted = load(tmp_path / "callback.jsonl"), load(tmp_path / "loop.jsonl")
    assert len(found) >= STEPS // 2
    assert [(diagnosis.step, diagnosis.rows) for diagnosis in found] == [(diagnosis.step, diagnosis.rows) for diagnosis in wanted]
    assert tracked == [(step + 1, values) for step, values in logged]  # the Trainer counts from one
    history = [entry for entry in trainer.state.log_history if set(entry) & set(logged[0][1])]
    assert [(entry["step"], {name: entry[name] for name in logged[0][1]}) for entry in history] == tracked
    assert 1 <= len(logged[0][1]) <= 12


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_the_training_is_bit_identical_and_nothing_stays_on_the_model(tmp_path: Path, optim: str) -> None:
    plain, _ = train(tmp_path, [], optim=optim)
    watched, _ = train(tmp_path, [callback := MonitorCallback(1)], optim=optim)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert hooks(watched) == 0
    assert callback.last is not None
    assert [row.module for row in callback.last.rows] == ["first", "second"]


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    train(tmp_path, [MonitorCallback(1, path=tmp_path / "steps.jsonl")], gradient_accumulation_steps=2, max_grad_norm=0.5)
    found = load(tmp_path / "steps.jsonl")
    assert len(found) == 3  # of 2 + 2 + 1 batches
    assert [row.call for row in found[1].rows if row.module == "first"] == [0, 1]


def test_a_training_that_goes_on_from_a_checkpoint_repeats_no_step(tmp_path: Path) -> None:
    tracked: list[int] = []
    options = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch"}
    train(tmp_path, [MonitorCallback(2, path=tmp_path / "whole.jsonl")], **options)
    whole = load(tmp_path / "whole.jsonl")
    callback = MonitorCallback(2, path=tmp_path / "rest.jsonl", tracker=lambda values, step: tracked.append(step))
    train(tmp_path, [callback], checkpoint=str(tmp_path / "out" / "checkpoint-3"), **options)
    rest = load(tmp_path / "rest.jsonl")
    assert [one.step for one in whole] == [0, 2, 4]
    assert [(one.step, one.rows) for one in rest] == [(one.step, one.rows) for one in whole[2:]]
    assert tracked == [5]  # the Trainer counts from one


def test_the_gradient_scaler_inside_accelerates_optimizer_changes_no_number() -> None:
    found = []
    for scale in (1.0, 1024.0):
        model, (first, *_) = Net(), rows()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
        callback, state = MonitorCallback(1), TrainerState()
        callback.on_train_begin(None, state, None, model=model, optimizer=optimizer)
        scaler.scale(model(first["x"][None], first["labels"][None])["loss"]).backward()
        optimizer.step()
        assert callback.last is not None
        found.append(callback.last)
        callback.detach()
    assert [one.about["loss scale"] for one in found] == [1.0, 1024.0]
    for a, b in zip(found[0].rows, found[1].rows, strict=True):
        assert a.multiplier_median == pytest.approx(b.multiplier_median, rel=1e-4)
        assert a.alignment_median == pytest.approx(b.alignment_median, rel=1e-4)


def test_a_monitor_of_what_accelerate_prepared_is_one_of_what_is_inside() -> None:
    x, labels = (torch.stack([row[name] for row in rows()[:ROWS]]) for name in ("x", "labels"))
    model, twin = Net(), Net()
    of_twin = torch.optim.SGD(twin.parameters(), lr=0.1)
    prepared, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Monitor(prepared, optimizer, 1) as monitor, Monitor(twin, of_twin, 1) as plain:
        for net, of_net in ((prepared, optimizer), (twin, of_twin)):
            net(x, labels)["loss"].backward()
            of_net.step()
    assert monitor.last is not None
    assert plain.last is not None
    assert monitor.last.rows == plain.last.rows
    assert hooks(model) == 0


@pytest.mark.parametrize("scaled", [False, True])
def test_the_diagnosis_of_a_wrapped_optimiser_is_that_of_the_one_inside(scaled: bool) -> None:
    x, labels = (torch.stack([row[name] for row in rows()[:ROWS]]) for name in ("x", "labels"))
    model = Net()
    inside = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    wrapped = diagnose(model, (x, labels), optimizer=AcceleratedOptimizer(inside, scaler=scaler))
    plain = diagnose(model, (x, labels), optimizer=inside)
    assert (wrapped.rows, wrapped.loss, wrapped.about) == (plain.rows, plain.loss, plain.about)


def test_log_false_leaves_the_history_alone(tmp_path: Path) -> None:
    _, plain = train(tmp_path, [])
    _, watched = train(tmp_path, [MonitorCallback(1, log=False)])
    assert [set(entry) for entry in watched.state.log_history] == [set(entry) for entry in plain.state.log_history]


def test_the_next_training_leaves_a_model_whose_training_broke_off(tmp_path: Path) -> None:
    class Breaking(MonitorCallback):
        def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
            if len(broken.seen) == 2 and not trained:
                raise RuntimeError("out of luck")

    broken, trained = Net(), False
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path, [callback := Breaking(1)], broken)
    assert hooks(broken) > 0
    trained = True
    after, _ = train(tmp_path, [callback])
    assert hooks(broken) == hooks(after) == 0
    assert callback.last is not None
    assert callback.last.step == STEPS - 1


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "affine_divergence.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'transformers\[torch\]'"):
        importlib.import_module("affine_divergence.integrations.transformers")
