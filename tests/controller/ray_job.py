"""`python -m tests.controller.ray_job CONFIG [raise|meet]`: watches over the driver of ray_toy.py as `hybridflow train` watches
over a job's. Without torch, which takes seconds to import."""

import sys
from unittest import mock

from hybridflow import ray_driver
from hybridflow.config.load import load

if __name__ == "__main__":
    command = [sys.executable, "-m", "tests.controller.ray_toy", *sys.argv[1:]]
    with mock.patch.object(ray_driver, "command", lambda *arguments: command):
        sys.exit(ray_driver.launch(load(sys.argv[1]), "cpu", sys.argv[1], []))
