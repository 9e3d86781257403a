"""The page in a real browser: it draws its curves, keeps its own policy, and runs nothing of what a model wrote."""

import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from hybridflow.report.page import report
from tests.report.runs import HOSTILE, write_run

CHROMIUM = shutil.which("chromium")
HERE = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")  # as root, and in a small container
QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
BLUE = (0x1F, 0x66, 0xB5)  # --run0 of page.css
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium (Debian)")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Of two runs, one of them without a bubble and with responses that would like to be more than text."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "long", 30), write_run(folder / "hostile", 8, HOSTILE, profile=False)]
    return report(runs, folder / "report.html")


def browse(folder: Path, page: Path, *options: str) -> tuple[str, list[str]]:
    """What the browser prints, and what its console says of the page."""
    own = (f"--user-data-dir={folder}/profile", "--enable-logging=stderr", "--window-size=1000,1400", "--hide-scrollbars")
    command = [CHROMIUM, *HERE, *QUIET, *own, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.timeout(300)
def test_curves_are_drawn_and_nothing_else_runs(page, tmp_path):
    dom, console = browse(tmp_path, page, "--dump-dom")
    assert console == []
    assert "<title>long and hostile: HybridFlow report</title>" in dom
    assert "hostile: mean reward from 0.09516 at step 1 to 0.5507 at step 8" in dom
    curves = re.findall(r'<path class="curve (?:bold )?run0 dash0(?: faint)?" d="M([^"]+)"', dom)
    assert sum(len(curve.split("L")) == 30 for curve in curves) >= 7  # reward, loss, their means, bubble, mismatch, memory
    heights = [float(point.split()[1]) for point in curves[0].split("L")]
    assert heights == sorted(heights, reverse=True) and heights[0] - heights[-1] > 100  # pixels: the reward grows
    assert "beyond the axis: step 1 took 30 s" in dom


@pytest.mark.timeout(300)
def test_a_picture_of_the_page_shows_curves(page, tmp_path):
    _, console = browse(tmp_path, page, f"--screenshot={tmp_path}/page.png", "--blink-settings=preferredColorScheme=1")  # light
    assert console == []
    picture = np.round(255 * matplotlib.image.imread(tmp_path / "page.png")[..., :3]).astype(int)
    assert picture.shape == (1400, 1000, 3)
    at_blue = np.argwhere((abs(picture - BLUE) < 12).all(axis=-1))
    assert len(at_blue) > 500 and np.ptp(at_blue[:, 1]) > 500  # a curve across the page, besides names and swatches
