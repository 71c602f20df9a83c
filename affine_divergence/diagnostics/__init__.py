# What a model's training step does to its activations.
from ._diagnose import diagnose as diagnose
from ._file import load as load
from ._matching import matching_lr as matching_lr
from ._monitor import Monitor as Monitor
from ._records import Diagnosis as Diagnosis
