"""Waits until a Ray cluster has registered what it is to have, and says every 30 s what it still waits for.

python launch/slurm/wait_for_ray.py 10.0.0.1:6379 --nodes 2 --cpus 8 --gpus 16 [--minutes 10]
"""

import argparse
import sys
import time

import ray

from hybridflow.controller.waiting import waiting


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--cpus", type=float, required=True)
    parser.add_argument("--gpus", type=float, default=0)
    parser.add_argument("--minutes", type=float, default=10)
    wanted = parser.parse_args()
    deadline = time.monotonic() + 60 * wanted.minutes
    goal = f"{wanted.nodes} nodes, {wanted.cpus:g} CPUs, {wanted.gpus:g} GPUs"
    with waiting(f"Ray at {wanted.address} to have {goal}"):
        join(wanted.address, deadline)
        while True:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            cpus, gpus = (sum(node.get(kind, 0) for node in alive) for kind in ("CPU", "GPU"))
            if len(alive) >= wanted.nodes and cpus >= wanted.cpus and gpus >= wanted.gpus:
                print(f"Ray at {wanted.address} has {len(alive)} nodes, {cpus:g} CPUs, {gpus:g} GPUs", flush=True)
                return 0
            if time.monotonic() > deadline:
                print(f"Ray has {len(alive)} nodes, {cpus:g} CPUs, {gpus:g} GPUs, not {goal}: see its output", file=sys.stderr)
                return 1
            time.sleep(0.5)


def join(address: str, deadline: float) -> None:
    """The head's port answers before the head itself has registered, on a busy machine by a minute.

    Raises:
        ConnectionError: Ray's own, of the last attempt.
    """
    while True:
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
