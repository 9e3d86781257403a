"""The run's folder: may it be written to, and does it hold a run already?"""

import shutil
import tempfile
from pathlib import Path

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


def check_run_folder(folder: Path, overwrite: bool) -> None:
    """Raises ConfigError: the folder holds a run that is not to be overwritten, or cannot be written to."""
    parent = _existing(folder)
    if not parent.is_dir():
        raise ConfigError(f"run.dir={folder}: {parent} is a file: choose another run.dir")
    try:
        tempfile.TemporaryDirectory(dir=parent).cleanup()  # permission bits do not tell for root or read-only mounts
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written ({parent}: {error.strerror}): choose another run.dir") from error
    held = [name for name in SIGNS_OF_A_RUN if (folder / name).exists()]
    if held and not overwrite:
        raise ConfigError(
            f"run.dir={folder} holds a run already ({held[0]}): set run.overwrite=true to delete it, or another run.dir"
        )


def check_space(folder: Path, weights: int) -> None:
    """Raises ConfigError: the folder's disk has no room for `weights` bytes, which the run will write in the end."""
    free = shutil.disk_usage(_existing(folder)).free
    if free < weights + SPARE_BYTES:
        raise ConfigError(
            f"run.dir={folder}: {free / 1e9:.2f} GB are free there, but the trained model takes {weights / 1e9:.2f} GB and the"
            f" rest about {SPARE_BYTES / 1e9:.1f} GB: free some, or choose another run.dir"
        )


def _existing(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder


def prepare_run_folder(folder: Path) -> None:
    """Make the folder, without what an earlier run wrote there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*(folder / name for name in RUN_FILES), *folder.glob(REPORTS_OF_TWO)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
