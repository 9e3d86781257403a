"""`python -m tests.rollout.alone FOLDER`: an engine in a world of one that no launcher started; prints greedy tokens."""

import sys

import torch.distributed as dist

from hybridflow.rollout.engine import Engine
from tests.rollout import scenarios


def main(folder: str) -> None:
    from tests.rollout.test_engine import GREEDY, PROMPTS

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = Engine(folder, 1, "float32", scenarios.MAX_MODEL_LEN, engine_args={"max_num_seqs": 4})
    scenarios.fill(engine, folder, 1)
    print(*engine.generate([PROMPTS[4]], GREEDY, seed=0)[0].tokens)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
