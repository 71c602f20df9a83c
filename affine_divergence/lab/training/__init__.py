# Training: many trials as one batched model, fast and reproducible.
from ._memory import keep_freed_memory as keep_freed_memory
from ._train import train as train
