# Measurements, each side by side with what it is against.
from ._layers import layers as layers
from ._training import training as training
