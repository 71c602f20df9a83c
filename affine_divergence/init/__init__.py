# Starts of a network with corrected layers: initial weights, gains, learning rates, and the theory that they follow.
from ._calibrate import calibrate_ as calibrate_
from ._calibration import Calibration as Calibration
from ._hidden_gain import hidden_gain_ as hidden_gain_
from ._mean_field import Depth as Depth, RandomLayer as RandomLayer, propagate as propagate
from ._param_groups import param_groups as param_groups
from ._signal import signal_ as signal_
