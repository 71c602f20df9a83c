# Training: many trials as one batched model, fast and reproducible.
from ._train import train as train
