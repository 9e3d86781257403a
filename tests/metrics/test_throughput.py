"""The FLOP formula against a count of a real model's matrix products, and the metrics that follow from it."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybridflow.batch import Batch
from hybridflow.config.load import load
from hybridflow.metrics import throughput
from hybridflow.planner.hardware import GPU
from megatron_ext.hf_config import HFConfig

SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def test_the_formula_is_torchs_own_count_of_a_forward_and_backward_pass():
    model = Qwen2ForCausalLM(Qwen2Config(attn_implementation="eager", **SHAPE))
    hf = HFConfig.from_dict({"architectures": ["Qwen2ForCausalLM"], **SHAPE})
    counted = 0
    for length in (7, 20):
        tokens = torch.randint(0, 96, (1, length))
        with FlopCounterMode(display=False) as counter:
            model(tokens).logits.sum().backward()
        counted += counter.get_total_flops()
    # the first layer's input needs no gradient of its own: torch counts every product, so they agree but for rotary tables
    assert throughput.training_flops(hf, [7, 20]) == pytest.approx(counted, rel=0.01)


def test_only_the_experts_that_a_token_goes_to_count():
    """Against torch's count of a model whose experts are computed one by one."""
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    config = Qwen3MoeConfig(attn_implementation="eager", experts_implementation="eager", **SHAPE, **sizes)
    model = Qwen3MoeForCausalLM(config)
    hf = HFConfig.from_dict({"architectures": ["Qwen3MoeForCausalLM"], **SHAPE, **sizes})
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 96, (1, 20))).logits.sum().backward()
    assert throughput.training_flops(hf, [20]) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_tokens_per_second_and_mfu(tmp_path, monkeypatch):
    fields = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "c.yaml").write_text(
        f"model: {{path: '{tmp_path}'}}\ncluster: {{ranks_per_node: 2}}\nrun: {{dir: '{tmp_path}/run'}}\n"
    )
    monkeypatch.setattr(
        throughput,
        "gpu",
        lambda: GPU("toy", 1e9, memory_bytes_per_second=1, wire_bytes_per_second=1, memory_bytes=1, fp32_flops=1),
    )
    meter = throughput.Throughput(load(tmp_path / "c.yaml"))
    batch = Batch(
        {
            "tokens": [torch.zeros(n, dtype=torch.int64) for n in (7, 20)],
            "loss_mask": [torch.arange(n) >= n - 5 for n in (7, 20)],
        }
    )
    meter.rollout(batch)
    meter.update(batch)
    found = meter.finish({"rollout": 2.0, "update": 0.5, "step": 4.0})
    hf = HFConfig.from_folder(tmp_path)
    assert found["perf/rollout_tokens_per_second_per_gpu"] == 10 / 2 / 2
    assert found["perf/update_tokens_per_second_per_gpu"] == 27 / 0.5 / 2
    assert found["perf/step_tokens_per_second_per_gpu"] == 27 / 4 / 2
    assert found["perf/mfu"] == pytest.approx(throughput.training_flops(hf, [7, 20]) / 0.5 / 2 / 1e9)
    assert meter.finish({"rollout": 1.0})["perf/rollout_tokens_per_second_per_gpu"] == 0  # a step starts from nothing
