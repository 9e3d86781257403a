"""Folders of runs, written by the recorder as a job has it write them."""

import io
import math
from pathlib import Path

from hybridflow.config.load import load
from hybridflow.metrics.recorder import Recorder

HOSTILE = (
    "</pre></td></script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">\u202eabc"
)


def write_run(folder: Path, steps: int = 12, response: str = "12", profile: bool = True, **keys: str) -> Path:
    """A run of so many steps, with evaluations before and after. `keys`: of the configuration, as YAML by section."""
    config = folder.with_suffix(".yaml")
    sections = {"model": "{path: models/m}", "run": f"{{dir: {folder}, steps: {steps}}}"} | keys
    config.write_text("".join(f"{name}: {text}\n" for name, text in sections.items()))
    with Recorder(folder, load(config), io.StringIO()) as recorder:
        for step in (1, 2):
            recorder.warm_start(step, {"loss": 3.0 / step})
        evaluate(recorder, 0, ["12+1", "7"])
        for step in range(1, steps + 1):
            recorder.samples([sample(step, "train", "5+7=", "12", response, 1.0), sample(step, "train", "1+1=", "2", "3", 0.0)])
            recorder.log(metrics(step, profile))
        evaluate(recorder, steps, ["12", "7"])
    return folder


def evaluate(recorder: Recorder, step: int, responses: list[str]) -> None:
    right = [float(response == answer) for response, answer in zip(responses, ("12", "7"), strict=True)]
    questions = zip(("5+7=", "3+4="), ("12", "7"), responses, right, strict=True)
    recorder.samples(sample(step, "evaluation", *question) for question in questions)
    recorder.evaluation(step, sum(right) / 2, 2, 0.5)


def sample(step: int, kind: str, prompt: str, answer: str, response: str, reward: float) -> dict:
    row = {"step": step, "kind": kind, "prompt": prompt, "answer": answer, "response": response, "reward": reward}
    return row | {"tokens": [1, 2], "prompt_tokens": [ord(letter) for letter in prompt]}


def metrics(step: int, profile: bool) -> dict:
    found = {
        "step": step,
        "reward/mean": 1 - math.exp(-step / 10),
        "reshard/verified": True if step == 1 else None,
        "mismatch/log_prob_abs_mean": 1e-5 * step,
        "actor/loss": 1 / step,
        "driver/bytes_sent": 1000 * step,
        "memory/peak_bytes/rollout": 2 << 30,
        "memory/peak_bytes/update": 3 << 30,
        "time/rollout": 2.0,
        "time/update": 1.0,
        "time/step": 30.0 if step == 1 else 3.5,
    }
    return found | ({"pipeline/bubble_mean": 0.25, "pipeline/bubble_max": 0.4} if profile else {})
