# What a model's training step does to its activations.
from ._matching import matching_lr as matching_lr
