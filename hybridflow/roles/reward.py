"""Reward and cost models: classifiers with one label that score whole sequences, in Megatron or as transformers has them."""

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hybridflow.batch import Batch
from hybridflow.config.schema import Config
from hybridflow.controller.protocols import THREE_D, remote
from hybridflow.roles.frozen import Frozen
from hybridflow.roles.megatron import MegatronRole
from megatron_ext import device, step


class RewardModel(Frozen, MegatronRole):
    """A decoder with a head of one number, in a layout of its own."""

    def __init__(self, name: str, config: Config):
        super().__init__(name, config)
        self.settle(self.role.offload)

    def outputs(self, micro_batches: list[step.MicroBatch]) -> list[dict[str, Tensor]] | None:
        return step.forward_scores(self.chunks, micro_batches)

    @remote(THREE_D)
    def scores(self, batch: Batch) -> Batch | None:
        """`scores` [N] float32: what the head says at the last of a sequence's `tokens` that is not the model's padding token,
        which is where transformers takes it. None off the last stage."""
        tokens = [without_padding(row, self.hf.pad_token) for row in batch.rows("tokens")]
        found = self.forward(Batch({"tokens": tokens}))
        return None if found is None else Batch({"scores": found.values("scores")})


class HFRewardModel(Frozen):
    """Any classifier of transformers', whole on each of its ranks."""

    def __init__(self, name: str, config: Config):
        """
        Raises:
            RuntimeError: the folder lacks weights of the model, which transformers would make up.
        """
        self.name = name
        self.role, self.layout, path = getattr(config.roles, name), config.layout(name), config.model_path(name)
        self.model, found = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=getattr(torch, config.dtype(name)),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=self.role.trust_remote_code,
            output_loading_info=True,
        )
        if found["missing_keys"]:
            raise RuntimeError(
                f"roles.{name}.model.path={path} lacks weights of {type(self.model).__name__}:"
                f" {', '.join(sorted(found['missing_keys'])[:4])}"
            )
        self.model.eval().requires_grad_(False).to(device.current())
        if self.role.offload and device.current().type == "cpu":  # the file's own pages cannot be let go of
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()
        self.settle(self.role.offload)

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    @remote(THREE_D)
    @torch.no_grad()
    def scores(self, batch: Batch) -> Batch:
        """`scores` [N] float32: the logit of each sequence."""
        rows, pad = batch.rows("tokens"), self.model.config.get_text_config().pad_token_id
        scores = torch.empty(len(rows))
        for group in padded_groups(batch.lengths().tolist(), self.role.forward_micro_batch_tokens if pad is not None else 0):
            tokens = torch.nn.utils.rnn.pad_sequence([rows[i] for i in group], batch_first=True, padding_value=pad or 0)
            lengths = torch.tensor([len(rows[i]) for i in group])
            mask = torch.arange(tokens.shape[1]) < lengths[:, None]
            inputs = {"input_ids": tokens, "attention_mask": mask.long()}
            logits = self.model(**{name: value.to(device.current()) for name, value in inputs.items()}).logits
            scores[group] = logits[:, 0].float().cpu()
        return Batch({"scores": scores})


def padded_groups(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of sequences that run together, about equally long ones, padded to at most `budget` tokens in all; a sequence
    that is longer, or any under a budget of 0, runs alone."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def without_padding(tokens: Tensor, pad: int | None) -> Tensor:
    """Tokens [L] up to the last one that is not `pad`; at least one."""
    if pad is None:
        return tokens
    kept = (tokens != pad).nonzero()
    return tokens[: int(kept[-1]) + 1 if len(kept) else 1]
