"""The baseline of a rollout: `vllm.LLM` by itself, as its documentation has it. Reads a job as JSON from stdin (see
`throughput.plain_rollout`) and writes the seconds of every timed round as a JSON list to the file of its argument."""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs from a checkout


def main() -> None:
    from vllm import LLM, SamplingParams

    from benchmarks.throughput import prompts

    job = json.load(sys.stdin)
    options = argparse.Namespace(**job.pop("options"))
    engine, arguments = job.pop("engine"), job.pop("engine_args")
    llm = LLM(**job, load_format="dummy", skip_tokenizer_init=True, logprobs_mode="processed_logprobs", **arguments)
    vocab_size = json.loads((Path(job["model"]) / "config.json").read_text())["vocab_size"]
    sampling = SamplingParams(max_tokens=options.response_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    seconds = []
    for attempt in range(options.warmup + options.steps):
        asked = [{"prompt_token_ids": tokens} for tokens in prompts(options, vocab_size, engine, attempt)]
        start = time.perf_counter()
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        if any(len(output.outputs[0].token_ids) != options.response_tokens for output in outputs):
            raise RuntimeError("a response is shorter than --response-tokens: the figures would mean nothing")
    Path(sys.argv[1]).write_text(json.dumps(seconds[options.warmup :]))


if __name__ == "__main__":
    main()
