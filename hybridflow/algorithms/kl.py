"""The coefficient of the KL penalty: fixed, or adapted so that the policy keeps a chosen distance from the reference."""

LARGEST_ERROR = 0.2  # relative, of a single step: one odd batch moves the coefficient only so far


class KLCoefficient:
    """Ziegler et al. 2019 (arXiv 1909.08593, section 2.2): a proportional controller of the coefficient's logarithm.

    With the KL of a step's responses, e = clip(KL / target - 1, -0.2, 0.2) and coefficient <- coefficient (1 + gain e).

    Attributes:
        value: what the penalty is multiplied with now.
        target: nats of a response; 0: `value` never changes.
    """

    def __init__(self, start: float, target: float = 0.0, gain: float = 0.1):
        self.value, self.target, self._gain = start, target, gain

    def adapt(self, kl: float) -> None:
        """Take in a step's mean KL of a response, summed over its tokens."""
        if self.target:
            error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.value *= 1 + self._gain * error
