# Corrections of the gradient alone: torch's own outputs, and gradients of weight and bias that move the activations as they ask.
