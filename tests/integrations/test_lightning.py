# Lightning's callback: the same diagnoses as a Monitor in a loop written out, the training as it was, nothing left behind.
from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from affine_divergence import Monitor
from affine_divergence.diagnostics import load
from affine_divergence.integrations.lightning import MonitorCallback

STEPS = 5
QUIET: Any = {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
# Lightning's advice on small runs: workers for the data, the length of an epoch; and what it calls of torch that torch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches.*is smaller than the logging interval.*"),
]


class Kept(DummyLogger):
    """What a trainer logs, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.entries.append((step, dict(metrics)))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(7, 6, generator=generator), torch.randint(3, (7,), generator=generator)) for _ in range(count)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def module(base: type = pl.LightningModule, fails_at: int | None = None, optimizers: int = 1) -> Any:
    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: Any, index: int) -> Tensor:
            if index == fails_at:
                raise RuntimeError("out of luck")
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            made = [sgd(self.parameters()) for _ in range(optimizers)]
            return made[0] if optimizers == 1 else made

    return Module()


def fit(model: Any, callbacks: list[Any], trainer: type = pl.Trainer, **options: Any) -> None:
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    trainer(**{**QUIET, "max_epochs": 1, "logger": False, **options}, callbacks=callbacks).fit(model, loader)


def in_a_loop(net: nn.Module, path: Path, track: Callable[..., object] | None = None, every: int = 2) -> None:
    optimizer = sgd(net.parameters())
    with Monitor(net, optimizer, every, path=path, tracker=track):
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks) for part in model.modules())


def test_its_diagnoses_are_those_of_a_monitor_in_a_loop(tmp_path: Path) -> None:
    logger, tracked = Kept(), []
    fit(module(), [MonitorCallback(2, path=tmp_path / "callback.jsonl")], logger=logger, log_every_n_steps=1)
    in_a_loop(nn.ModuleDict({"net": network()})["net"], tmp_path / "loop.jsonl", lambda values, step: tracked.append((step, dict(values))))
    found, wanted = load(tmp_path / "callback.jsonl"), load(tmp_path / "loop.jsonl")
    assert [diagnosis.step for diagnosis in found] == [diagnosis.step for diagnosis in wanted]
    assert len(found) >= STEPS // 2
    for one, other in zip(found, wanted, strict=True):
        assert [row.module for row in one.rows] == [f"net.{row.module}" for row in other.rows] == ["net.0", "net.2"]
        for a, b in zip(one.rows, other.rows, strict=True):
            assert {**vars(a), "module": ""} == {**vars(b), "module": ""}
    ours = [(step, values) for step, values in logger.entries if set(values) & set(tracked[0][1])]
    assert ours == tracked
    assert 1 <= len(ours[0][1]) <= 12


def test_the_training_is_bit_identical_and_nothing_stays_on_the_model() -> None:
    plain, watched = module(), module()
    fit(plain, [])
    fit(watched, [callback := MonitorCallback(1)])
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert hooks(watched) == 0
    assert callback.last is not None
    assert len(callback.last.rows) == 2


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    fit(module(), [MonitorCallback(1, path=tmp_path / "steps.jsonl")], accumulate_grad_batches=2, gradient_clip_val=0.5)
    found = load(tmp_path / "steps.jsonl")
    assert len(found) == 3  # of 2 + 2 + 1 batches
    assert [[(row.call, row.rows + row.masked) for row in diagnosis.rows if row.module == "net.0"] for diagnosis in found[1:]] == [
        [(0, 7), (1, 7)],
        [(0, 7)],
    ]


def test_after_an_error_in_the_training_nothing_stays_on_the_model() -> None:
    model = module(fails_at=3)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(model, [MonitorCallback(1)])
    assert hooks(model) == 0


def test_a_training_that_goes_on_is_logged_at_the_trainers_own_step() -> None:
    trainer = pl.Trainer(**QUIET, logger=(logger := Kept()), max_epochs=1, callbacks=[MonitorCallback(2)])
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    trainer.fit(model := module(), loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader)
    assert [step for step, values in logger.entries if "affine_divergence/alignment" in values] == [0, 2, 4, 6, 8]


def test_a_training_that_goes_on_from_a_checkpoint_repeats_no_step(tmp_path: Path) -> None:
    fit(module(), [MonitorCallback(2, path=tmp_path / "whole.jsonl")], max_epochs=2)
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    for epochs, checkpoint in ((1, None), (2, tmp_path / "first.ckpt")):
        trainer = pl.Trainer(**QUIET, logger=False, max_epochs=epochs, callbacks=[MonitorCallback(2, path=tmp_path / "parts.jsonl")])
        trainer.fit(module(), loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "first.ckpt")
    whole, parts = load(tmp_path / "whole.jsonl"), load(tmp_path / "parts.jsonl")
    assert [one.step for one in parts] == [0, 2, 4, 6, 8]
    assert [(one.step, one.rows) for one in parts] == [(one.step, one.rows) for one in whole]


def test_the_gradient_scaler_of_16_mixed_changes_no_number() -> None:
    found = []
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        fit(module(), [callback := MonitorCallback(4)], plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        assert callback.last is not None
        found.append(callback.last)
    assert [one.about["loss scale"] for one in found] == [1.0, 1024.0]
    for a, b in zip(found[0].rows, found[1].rows, strict=True):
        assert a.multiplier_median == pytest.approx(b.multiplier_median, rel=0.02)  # float16
        assert a.alignment_median == pytest.approx(b.alignment_median, rel=0.02)
    assert all(check.ok for check in found[1].checks)


def test_log_false_logs_nothing() -> None:
    logger = Kept()
    fit(module(), [MonitorCallback(1, log=False)], logger=logger)
    assert logger.entries == []


def test_include_measures_what_it_names_alone(tmp_path: Path) -> None:
    fit(module(), [callback := MonitorCallback(1, include="net.2", plain=False)])
    assert callback.last is not None
    assert [row.module for row in callback.last.rows] == ["net.2"]
    assert callback.last.rows[0].alignment_median_plain != callback.last.rows[0].alignment_median_plain  # NaN


def test_several_optimizers_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"watches one optimizer, Module has 2; .* attach an ad\.Monitor\(self, optimizer\) for each"):
        fit(module(optimizers=2), [MonitorCallback(1)])


def test_a_monitor_for_each_of_several_optimizers_takes_what_lightning_wraps_them_in() -> None:
    class Alternating(type(module(optimizers=2))):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.monitors = [Monitor(self, optimizer, 1).attach() for optimizer in self.optimizers()]

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()[index % 2]
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()

    fit(model := Alternating(), [])
    assert [monitor.steps for monitor in model.monitors] == [3, 2]
    assert all(len(monitor.last.rows) == 2 for monitor in model.monitors)


def test_the_trainer_of_the_package_pytorch_lightning_takes_it_too() -> None:
    fit(module(pytorch_lightning.LightningModule), [callback := MonitorCallback(1)], pytorch_lightning.Trainer)
    assert callback.last is not None
    assert len(callback.last.rows) == 2


def test_a_callback_can_be_copied_before_the_training() -> None:
    fit(module(), [callback := copy.deepcopy(MonitorCallback(1))])
    assert callback.last is not None


def test_without_lightning_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "affine_divergence.integrations.lightning")
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.import_module("affine_divergence.integrations.lightning")
