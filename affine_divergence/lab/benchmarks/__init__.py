# Measurements, each side by side with what it is against.
from ._corrections import corrections as corrections
from ._diagnosis import diagnosis as diagnosis
from ._layers import layers as layers
from ._steps import step_seconds as step_seconds
from ._stopping import stopping as stopping
from ._training import training as training
