"""A canary for the weights that a rollout runs on: warns when vLLM's log-probs move away from Megatron's.

The two differ by rounding alone, about as much in every step. A jump means that they no longer run the same weights (one
that was not written, a stale cache), or no longer compute the same thing.
"""

import statistics
from typing import Any

JUMP = 3.0  # times the median of the run so far
LEARN = 3  # measurements before a jump can be told from the run's own level
REPEAT = 10  # measurements until an alarm that goes on is said again
# Mean absolute difference of the log-probs at temperature 1, by the coarser dtype of the two sides: what rounding may reach
# in an unlucky step (float32: 3e-5 is usual, bfloat16: 0.04), and what no rounding explains, whatever the run's own level.
FLOOR = {"float32": 1e-3, "bfloat16": 0.1}
CEILING = {"float32": 0.05, "bfloat16": 0.7}


class Canary:
    """Knows the gaps of a run's resharding so far; `look` at each new one.

    Args:
        dtypes: of the actor and of the rollout.
        temperature: the sampling's; log-probs are of logits divided by it, and so are their differences.
    """

    def __init__(self, dtypes: tuple[str, str], temperature: float):
        coarser = "bfloat16" if "bfloat16" in dtypes else "float32"
        scale = 1.0 / min(temperature, 1.0)
        self._floor, self._ceiling = FLOOR[coarser] * scale, CEILING[coarser] * scale
        self._gaps: list[float] = []  # of healthy steps
        self._alarms = 0  # in a row

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON can hold it."""
        return {"gaps": self._gaps, "alarms": self._alarms}

    def load_state(self, state: dict[str, Any]) -> None:
        self._gaps, self._alarms = list(state["gaps"]), state["alarms"]

    def look(self, gap: float) -> str:
        """What to say about this step's mean absolute difference of log-probs; empty when nothing stands out."""
        usual = statistics.median(self._gaps) if len(self._gaps) >= LEARN else None
        jumped = usual is not None and gap > max(JUMP * usual, self._floor)
        if not jumped and gap <= self._ceiling:
            self._gaps.append(gap)
            self._alarms = 0
            return ""
        self._alarms += 1
        if self._alarms % REPEAT != 1:
            return ""
        usually = f"{usual:.2g} is usual in this run" if usual is not None else f"rounding explains {self._ceiling:.2g}"
        return (
            f"warning: vLLM's log-probs are {gap:.2g} away from Megatron's on average, where {usually}: a weight that was not"
            " written, or two models that compute differently; set resharding.verify_every=1 to compare all weights bit by bit"
        )
