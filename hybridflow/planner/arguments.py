"""The command line of `hybridflow plan`. Apart from what it runs, so that help comes at once."""

import argparse

USAGE = "hybridflow plan --config FILE [key=value ...] [--no-search] [--gpu H200 --nodes N --gpus-per-node N]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file; key=value arguments override its keys")
    parser.add_argument("--no-search", action="store_true", help="only the forecast of the job as it is configured")
    parser.add_argument("--gpu", metavar="KIND", help="H200, H100 or A100; by default this machine's")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="of a GPU, where it is not the kind's usual")
    parser.add_argument("--network", type=float, metavar="GB/S", help="of a GPU to other nodes, each way (50: 400 Gb/s)")
    parser.add_argument("--nodes", type=int, metavar="N", help="instead of cluster.nodes")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="instead of cluster.ranks_per_node")
    parser.add_argument("--prompt-tokens", type=float, metavar="N", help="mean; by default sampling.max_prompt_tokens")
    parser.add_argument("--response-tokens", type=float, metavar="N", help="mean; by default sampling.max_response_tokens")
    parser.add_argument("--calibration", metavar="FILE", help="what --save wrote")
    parser.add_argument(
        "--calibrate",
        nargs="+",
        default=[],
        metavar="RESULTS.json",
        help="fit the forecast to measured runs (planner/records.py)",
    )
    parser.add_argument("--save", metavar="FILE", help="write the fitted calibration")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="placements to show (10)")
    parser.add_argument("--write", metavar="FILE", help="write the config of the best placement")
