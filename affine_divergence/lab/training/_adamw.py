# AdamW for the replicas of a stack, by torch's own fused step, each with its learning rate and the scales of its weights.
#
# A parameter V = sW of a replica steps as W would under torch.optim.AdamW with the rate η, ε and the weight decay λ: V takes the rate sη,
# ε/s and λ/s.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from affine_divergence.lab.trial import Trial

BETAS, EPS = (0.9, 0.999), 1e-8  # torch.optim.AdamW's


class AdamW:
    """Steps parameters whose first dimension is the replica; `gradients` is where the gradients of a step are to be written."""

    def __init__(self, trials: Sequence[Trial], parameters: Sequence[Tensor], scales: Sequence[Sequence[float]]) -> None:
        self._step = torch.zeros((), device=parameters[0].device)
        self._moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in parameters]
        self._scales = [list(of_parameter) for of_parameter in scales]
        self._arrange(trials, parameters)

    def _arrange(self, trials: Sequence[Trial], parameters: Sequence[Tensor]) -> None:
        # One call for all of a replica's parameters that have one scale: a call costs about as much as a step of a small layer.
        self._trials = list(trials)
        self.gradients = [torch.empty_like(parameter) for parameter in parameters]
        self._calls: list[tuple[Trial, float, tuple[list[Tensor], ...]]] = []
        for replica, trial in enumerate(trials):
            by_scale: dict[float, list[int]] = defaultdict(list)
            for number, of_parameter in enumerate(self._scales):
                by_scale[of_parameter[replica]].append(number)
            for scale, numbers in by_scale.items():
                tensors = (parameters, self.gradients, [one for one, _ in self._moments], [two for _, two in self._moments])
                self._calls.append((trial, scale, tuple([of_kind[number][replica] for number in numbers] for of_kind in tensors)))

    def step(self, pace: float) -> None:
        """Step every parameter by its gradient, at `pace` times the learning rates."""
        self._step += 1
        for trial, scale, tensors in self._calls:
            _fused_step(trial, scale, pace, self._step, *tensors)

    def keep(self, replicas: Sequence[int], parameters: Sequence[Tensor]) -> None:
        """Go on with some of the replicas, whose parameters these are."""
        index = torch.tensor(replicas, device=self._step.device)
        self._moments = [(first[index], second[index]) for first, second in self._moments]
        self._scales = [[of_parameter[i] for i in replicas] for of_parameter in self._scales]
        self._arrange([self._trials[i] for i in replicas], parameters)


class OneByOne:
    """The same for a large parameter of each replica, right after its gradient, so that no more than one gradient is in memory."""

    def __init__(self, trials: Sequence[Trial], like: Sequence[Tensor], scales: Sequence[float]) -> None:
        self._step = torch.zeros((), device=like[0].device)
        moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in like]
        self._states = [(trial, scale, *pair) for trial, scale, pair in zip(trials, scales, moments, strict=True)]

    def begin(self) -> None:
        """Count a step, in which each replica is updated once."""
        self._step += 1

    def update(self, replica: int, parameter: Tensor, gradient: Tensor, pace: float) -> None:
        """Step a replica's parameter by its gradient, at `pace` times its learning rate."""
        trial, scale, first, second = self._states[replica]
        _fused_step(trial, scale, pace, self._step, [parameter], [gradient], [first], [second])

    def keep(self, replicas: Sequence[int]) -> None:
        """Go on with some of the replicas."""
        self._states = [self._states[i] for i in replicas]


def _fused_step(
    trial: Trial,
    scale: float,
    pace: float,
    step: Tensor,
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
) -> None:
    torch._fused_adamw_(
        parameters,
        gradients,
        first,
        second,
        [],
        [step] * len(parameters),
        lr=trial.learning_rate * scale * pace,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=trial.weight_decay / scale,
        eps=EPS / scale,
        amsgrad=False,
        maximize=False,
    )
