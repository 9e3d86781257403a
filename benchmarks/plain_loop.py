"""The baseline of the main job: GRPO as a plain loop over HF transformers and vLLM on one GPU, without Megatron.

    python benchmarks/plain_loop.py --config configs/smollm2_chain_sum.yaml --steps 30 --out plain.json

Same data, rewards, sampling limits, batch, mini-batches, clipping and learning-rate schedule as the config says. The model
is trained in fp32 under bf16 autocast with fused AdamW; sequences are padded to the longest of a micro-batch of 128, sorted
by length; the engine stays awake and takes the weights through vLLM's own `reload_weights`.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import time

import torch

from hybridflow.algorithms.advantages import group_advantages
from hybridflow.config.load import load
from hybridflow.data.sources import open_source
from hybridflow.data.text import Text
from hybridflow.rewards.pool import open_scorer
from hybridflow.rewards.scorers import ScorerSpec
from megatron_ext.optimizer import OptimizerSettings

MICRO_BATCH = 128  # sequences


class PlainLoop:
    def __init__(self, config, text, source, scorer):
        from transformers import AutoModelForCausalLM
        from vllm import LLM

        self.config, self.text, self.source, self.scorer = config, text, source, scorer
        self.position = 0
        path, sampling = config.model_path("actor"), config.sampling
        self.llm = LLM(
            model=path,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=sampling.max_prompt_tokens + sampling.max_response_tokens,
            gpu_memory_utilization=0.4,
            logprobs_mode="processed_logprobs",
            seed=config.run.seed,
            disable_log_stats=True,
        )
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda()
        optimizer = config.roles.actor.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=tuple(optimizer.betas),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.schedule = OptimizerSettings(**dataclasses.asdict(optimizer) | {"betas": tuple(optimizer.betas)})
        self.seconds: dict[str, list[float]] = {}

    def timed(self, phase: str, function, *args):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = function(*args)
        torch.cuda.synchronize()
        self.seconds.setdefault(phase, []).append(time.perf_counter() - start)
        return result

    def step(self, index: int) -> float:
        prompts = self.config.batch.prompts
        problems, self.position = self.source.take(self.position, prompts)
        sequences = self.timed("rollout", self.generate, problems, index)
        rewards = torch.tensor(self.timed("reward", self.score, problems, sequences))
        groups = torch.arange(prompts).repeat_interleave(self.config.batch.samples_per_prompt)
        advantages = group_advantages(rewards.float(), groups, self.config.algorithm.normalize_advantages)
        self.timed("update", self.update, sequences, advantages, index)
        self.timed("weights", self.send_weights)
        return rewards.float().mean().item()

    def score(self, problems, sequences):
        asked = [problem for problem in problems for _ in range(self.config.batch.samples_per_prompt)]
        responses = [self.text.decode(list(response)) for _, response in sequences]
        pairs = zip(asked, responses, strict=True)
        return self.scorer.score([(p.question, response, p.answer, p.metadata) for p, response in pairs]).rewards

    def generate(self, problems, index):
        from vllm import SamplingParams

        sampling = self.config.sampling
        parameters = SamplingParams(
            n=self.config.batch.samples_per_prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_response_tokens,
            stop_token_ids=self.text.stop_token_ids,
            logprobs=0,
            detokenize=False,
            seed=index,
        )
        prompts = [{"prompt_token_ids": problem.prompt_tokens} for problem in problems]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [(output.prompt_token_ids, sample.token_ids) for output in outputs for sample in output.outputs]

    def update(self, sequences, advantages, index) -> None:
        """One optimizer step per mini-batch; with several, the old log-probs are those of the policy before the first."""
        count = self.config.batch.mini_batches
        parts = [list(range(len(sequences)))[number::count] for number in range(count)]
        old = [self.old_log_probs(sequences, part) for part in parts] if count > 1 else [None]
        for number, (part, before) in enumerate(zip(parts, old, strict=True)):
            self.optimizer_step(sequences, advantages, part, before, index * count + number)

    def optimizer_step(self, sequences, advantages, part, old, update) -> None:
        settings, algorithm = self.config.roles.actor.optimizer, self.config.algorithm
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr_at(update)
        self.optimizer.zero_grad()
        total = sum(len(sequences[i][1]) for i in part)
        for number, rows in enumerate(self.micro_batches(sequences, part)):
            log_probs, mask = self.log_probs(sequences, rows)
            ratio = torch.exp(log_probs - (old[number] if old else log_probs.detach()))
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            advantage = advantages[rows, None].cuda()
            loss = -(torch.minimum(ratio * advantage, clipped * advantage) * mask).sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip)
        self.optimizer.step()

    @torch.no_grad()
    def old_log_probs(self, sequences, part):
        return [self.log_probs(sequences, rows)[0] for rows in self.micro_batches(sequences, part)]

    def micro_batches(self, sequences, part):
        order = sorted(part, key=lambda i: len(sequences[i][0]) + len(sequences[i][1]))
        return [order[start : start + MICRO_BATCH] for start in range(0, len(order), MICRO_BATCH)]

    def log_probs(self, sequences, indices):
        """Log-probs [rows, length - 1] of every next token, and where it is one of the response's."""
        rows = [torch.tensor([*sequences[i][0], *sequences[i][1]]) for i in indices]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).cuda()
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, i in enumerate(indices):
            mask[row, len(sequences[i][0]) : len(rows[row])] = True
        attention = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(tokens, attention_mask=attention).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return -nll.view(len(rows), -1), mask[:, 1:].cuda()

    def send_weights(self) -> None:
        weights = ((name, value.to(torch.bfloat16)) for name, value in self.model.state_dict().items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = load(args.config, args.overrides)
    text = Text(config.model_path("actor"))
    source = open_source(config.data, text.tokenizer, config.sampling.max_prompt_tokens, config.evaluation.problems)
    spec = ScorerSpec(config.reward.kind, config.reward.function, config.data.task, dict(config.data.options))
    with contextlib.closing(open_scorer(spec, config.reward.concurrency, config.reward.timeout)) as scorer:
        loop = PlainLoop(config, text, source, scorer)
        rewards, seconds = [], []
        for index in range(args.steps):
            start = time.perf_counter()
            rewards.append(loop.step(index))
            seconds.append(time.perf_counter() - start)
            print(f"step {index} reward {rewards[-1]:.3f} {seconds[-1]:.3f} s", flush=True)
    warm = slice(min(5, args.steps - 1), None)
    results = {
        "step_seconds_median": statistics.median(seconds[warm]),
        "phase_seconds_median": {name: statistics.median(values[warm]) for name, values in loop.seconds.items()},
        "rewards": rewards,
    }
    with open(args.out, "w") as file:
        json.dump({"config": args.config, "hardware": torch.cuda.get_device_name(), "results": results}, file, indent=1)
    print(json.dumps({name: value for name, value in results.items() if name != "rewards"}))


if __name__ == "__main__":
    main()
