"""The run's folder: may it be written to, and does it hold a run already?"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from hybridflow.config.folders import check_writable, existing
from hybridflow.config.schema import ConfigError

# What a run, and `report` about it, writes into its folder; `overwrite` deletes these and nothing else.
RUN_FILES = (
    "config.yaml", "placement.txt", "versions.json", "metrics.jsonl", "samples.jsonl", "warm_start.jsonl", "evaluation.jsonl",
    "summary.json", "tensorboard", "trackers", "timeline", "rollouts", "plots", "checkpoints", "hf", "skipped",
    "report.html",
)  # fmt: skip
REPORTS_OF_TWO = "report-with-*.html"
SPARE_BYTES = 100 << 20  # for what a run writes besides weights
SIGNS_OF_A_RUN = ("config.yaml", "metrics.jsonl", "checkpoints")


def check_run_folder(folder: Path, overwrite: bool, broken: Sequence[str] = ()) -> None:
    """`broken`: what is wrong with the checkpoints that are there.

    Raises:
        ConfigError: the folder holds a run that is not to be overwritten, or cannot be written to.
    """
    check_writable(f"run.dir={folder}", folder, "another run.dir")
    held = [name for name in SIGNS_OF_A_RUN if (folder / name).exists()]
    if held and not overwrite:
        why = f", and no whole checkpoint to go on from: {broken[-1]}" if broken else f" already ({held[0]})"
        raise ConfigError(f"run.dir={folder} holds a run{why}: set run.overwrite=true to delete it, or another run.dir")


def check_space(folder: Path, weights: int) -> None:
    """Raises ConfigError: the folder's disk has no room for `weights` bytes, which the run will write in the end."""
    free = shutil.disk_usage(existing(folder)).free
    if free < weights + SPARE_BYTES:
        raise ConfigError(
            f"run.dir={folder}: {free / 1e9:.2f} GB are free there, but the trained model takes {weights / 1e9:.2f} GB and the"
            f" rest about {SPARE_BYTES / 1e9:.1f} GB: free some, or choose another run.dir"
        )


def prepare_run_folder(folder: Path) -> None:
    """Make the folder, without what an earlier run wrote there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*(folder / name for name in RUN_FILES), *folder.glob(REPORTS_OF_TWO)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
