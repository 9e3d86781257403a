"""Draws the reward of a run over its steps."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hybridflow.metrics.summary import History
from hybridflow.writing import writing

WINDOW = 10  # steps of the moving mean


def plot_reward(history: History, path: Path) -> None:
    """Write a PNG with the mean reward per step, its moving mean, and the greedy accuracy where it was measured."""
    points = history.rewards()
    steps, rewards = [step for step, _ in points], [reward for _, reward in points]
    means = [sum(rewards[max(0, i - WINDOW + 1) : i + 1]) / min(WINDOW, i + 1) for i in range(len(rewards))]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="mean reward of a step")
    axes.plot(steps, means, color="#08519c", linewidth=2, label=f"mean of {WINDOW} steps")
    if history.evaluations:
        at, accuracy = [e.step for e in history.evaluations], [e.accuracy for e in history.evaluations]
        axes.plot(
            at, accuracy, "o", color="#d94801", label=f"greedy accuracy, {history.evaluations[0].problems} held-out problems"
        )
    axes.set(xlabel="step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path)
