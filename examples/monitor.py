# A training with a Monitor: the perceptron of `affdiv diagnose --example mlp` on scikit-learn's digits, every 20th step into a file.
#
#     python examples/monitor.py training.jsonl
#     affdiv diagnose --from training.jsonl --out FOLDER     # the page, with the layers by step
from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import affine_divergence as ad
from affine_divergence.lab.data import load, make_splits
from affine_divergence.lab.examples import example

STEPS, EVERY, BATCH, RATE = 400, 20, 128, 0.1


def train(path: str, steps: int = STEPS) -> float:
    """Train by plain gradient descent, write what the Monitor finds, return the accuracy on the validation images."""
    Path(path).unlink(missing_ok=True)  # a Monitor appends
    splits = make_splits(load("digits"))
    model = example("mlp").model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    order = torch.Generator().manual_seed(0)
    with ad.Monitor(model, optimizer, EVERY, path=path) as monitor:
        for _ in range(steps):
            batch = torch.randint(len(splits.train.inputs), (BATCH,), generator=order)
            optimizer.zero_grad()
            F.cross_entropy(model(splits.train.inputs[batch]), splits.train.labels[batch]).backward()
            optimizer.step()
    print(monitor.last)
    with torch.no_grad():
        right = model(splits.validation.inputs).argmax(1) == splits.validation.labels
    return float(right.float().mean())


if __name__ == "__main__":
    print(f"accuracy on the validation images: {train(*sys.argv[1:]):.1%}")
