# Starts of a network with corrected layers: initial weights, and the theory that they follow.
from __future__ import annotations
