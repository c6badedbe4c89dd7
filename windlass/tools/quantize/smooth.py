"""SmoothQuant: some of the inputs' outliers are moved into the weights before both are rounded."""

from __future__ import annotations

from torch import Tensor

_SMALLEST = 1e-5


def smoothing_scale(weight: Tensor, max_abs: Tensor, alpha: float = 0.5) -> Tensor:
    """What to divide each input feature by, and to multiply the weight's column with.

    alpha 0 leaves all the difficulty with the inputs, 1 gives all of it to the weight.
    """
    largest_weight = weight.abs().amax(0).clamp(min=_SMALLEST)
    return (max_abs.clamp(min=_SMALLEST) ** alpha / largest_weight ** (1 - alpha)).clamp(
        min=_SMALLEST
    )
