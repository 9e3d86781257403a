"""Loss, every gradient, log-probs and entropy of a Megatron model against HF, over layouts, families and packing."""

import pytest
import torch

from megatron_ext.layout import Layout, Split

TP2_PP2 = Layout(4, tp=2, pp=2)
TP2_SP = Layout(4, tp=2, sequence_parallel=True)
PP4 = Layout(4, pp=4)
DP2_PP2 = Layout(4, pp=2)
TP2_PP2_VPP2 = Layout(4, tp=2, pp=2, vpp=2, sequence_parallel=True)
DP2_PP2_VPP2 = Layout(4, pp=2, vpp=2)
PP2_BY_HAND = Layout(4, pp=2, split=Split((3, 1)))
DP2_PP2_VPP4 = Layout(4, pp=2, vpp=4)
PP4_VPP2 = Layout(4, pp=4, vpp=2)
PP4_VPP4 = Layout(4, pp=4, vpp=4)
PP4_VPP2_BY_COST = Layout(4, pp=4, vpp=2, split=Split(embedding=1, loss=2))
NOT_OVERLAPPED = {"overrides": {"overlap_p2p_comm": False}}
FUSED = {"overrides": {"gradient_accumulation_fusion": True}}
PP2_VPP2_LOSS = Layout(4, tp=2, pp=2, vpp=2, sequence_parallel=True, split=Split(loss=1))
PP4_BARE_ENDS = Layout(4, pp=4, split=Split((0, 2, 2, 0)))
PP2_VPP2_BARE_ENDS = Layout(4, pp=2, vpp=2, split=Split((0, 1, 2, 0)))
MOE = {
    "tp2-ep2": Layout(4, tp=2, ep=2, sequence_parallel=True),
    "ep4": Layout(4, ep=4),
    "ep2-etp2": Layout(4, tp=2, ep=2, etp=2, sequence_parallel=True),
    "ep2-pp2": Layout(4, pp=2, ep=2),
    "dp2-ep2": Layout(4, ep=2),
    "tp2-pp2": Layout(4, tp=2, pp=2, sequence_parallel=True),
    "tp2-dp2": Layout(4, tp=2, sequence_parallel=True),
    "etp2-dp4": Layout(4, etp=2, ep=2),
    "ep2-pp2-vpp2-3-layers": Layout(4, pp=2, vpp=2, ep=2, split=Split((0, 1, 2, 0))),
}
TEMPERATURE = 0.7

CASES = {
    "tp2-pp2": (TP2_PP2, {"family": "qwen2"}, {}),
    "tp2-pp2-tied": (TP2_PP2, {"family": "qwen2", "tied": True, "vocab_size": 131}, {}),
    "tp2-pp2-llama": (TP2_PP2, {"family": "llama"}, {}),
    "tp2-pp2-qwen3": (TP2_PP2, {"family": "qwen3", "tied": True, "head_dim": 16}, {}),
    "tp2-pp2-recompute": (TP2_PP2, {"family": "qwen2"}, {"recompute": "full"}),
    "tp2-sp-dp2": (TP2_SP, {"family": "qwen2", "vocab_size": 131}, {}),
    "tp2-sp-dp2-qwen3": (TP2_SP, {"family": "qwen3", "head_dim": 16}, {"recompute": "mlp"}),
    "tp2-dp2-tied": (Layout(4, tp=2), {"family": "llama", "tied": True, "vocab_size": 131}, {}),
    "pp4": (PP4, {"family": "qwen2", "tied": True}, {}),
    "dp2-pp2": (DP2_PP2, {"family": "qwen2"}, {}),
    "dp2-pp2-llama-tied": (DP2_PP2, {"family": "llama", "tied": True}, {"recompute": "selective"}),
    "tp2-pp2-vpp2-sp": (TP2_PP2_VPP2, {"family": "qwen2", "tied": True}, {}),
    "dp2-pp2-vpp2": (DP2_PP2_VPP2, {"family": "qwen3", "head_dim": 16}, {}),
    # chunks; five micro-batches at least, filled up to six (pp=2) or eight (pp=4)
    "dp2-pp2-vpp4": (DP2_PP2_VPP4, {"family": "qwen2", "num_hidden_layers": 8, "tied": True}, {}),
    "pp4-vpp2": (PP4_VPP2, {"family": "qwen2", "num_hidden_layers": 8}, {"recompute": "full"}),
    "pp4-vpp4": (PP4_VPP4, {"family": "llama", "num_hidden_layers": 16, "tied": True}, {"recompute": "selective"}),
    "pp4-vpp2-9-layers-by-cost": (PP4_VPP2_BY_COST, {"family": "llama", "num_hidden_layers": 9}, {}),
    "dp2-pp2-vpp4-transfers-not-overlapped": (DP2_PP2_VPP4, {"family": "llama", "num_hidden_layers": 8}, NOT_OVERLAPPED),
    "pp4-vpp2-transfers-not-overlapped": (PP4_VPP2, {"family": "qwen2", "num_hidden_layers": 8, "tied": True}, NOT_OVERLAPPED),
    "dp2-pp2-vpp2-gradients-overlapped": (DP2_PP2_VPP2, {"family": "llama", "tied": True}, {"overlap_grad_reduce": True}),
    "dp2-pp2-gradients-overlapped": (DP2_PP2, {"family": "qwen2"}, {"overlap_grad_reduce": True}),
    # weights' gradients added by the product that makes them; tied, an embedding's and an output layer's come together
    "tp2-pp2-fused-gradients": (TP2_PP2, {"family": "qwen2"}, FUSED),
    "tp2-sp-dp2-tied-fused-gradients": (TP2_SP, {"family": "llama", "tied": True}, FUSED | {"overlap_grad_reduce": True}),
    "qwen3-moe-ep2-pp2-fused-gradients": (MOE["ep2-pp2"], {"family": "qwen3_moe"}, FUSED),
    # uneven stages
    "pp4-7-layers": (PP4, {"family": "qwen2", "num_hidden_layers": 7}, {}),
    "pp4-7-layers-tied": (PP4, {"family": "llama", "num_hidden_layers": 7, "tied": True}, {"recompute": "full"}),
    "dp2-pp2-3+1-tied": (PP2_BY_HAND, {"family": "qwen2", "tied": True}, {}),
    "dp2-pp2-vpp2-7-layers": (DP2_PP2_VPP2, {"family": "llama", "num_hidden_layers": 7}, {}),
    "tp2-pp2-vpp2-sp-5-layers-and-loss": (PP2_VPP2_LOSS, {"family": "qwen2", "num_hidden_layers": 5, "tied": True}, {}),
    "pp4-bare-ends-tied": (PP4_BARE_ENDS, {"family": "qwen2", "tied": True}, {}),
    "dp2-pp2-vpp2-bare-ends": (PP2_VPP2_BARE_ENDS, {"family": "llama", "num_hidden_layers": 3}, {}),
    # experts
    "qwen3-moe-tp2-ep2": (MOE["tp2-ep2"], {"family": "qwen3_moe"}, {}),
    "qwen3-moe-ep4-unnormalised": (MOE["ep4"], {"family": "qwen3_moe", "norm_topk_prob": False}, {}),
    "qwen3-moe-ep2-etp2": (MOE["ep2-etp2"], {"family": "qwen3_moe", "num_experts_per_tok": 3}, {"recompute": "full"}),
    "qwen3-moe-ep2-pp2": (MOE["ep2-pp2"], {"family": "qwen3_moe"}, {"recompute": "selective"}),
    "qwen3-moe-dp2-ep2": (MOE["dp2-ep2"], {"family": "qwen3_moe", "vocab_size": 131}, {"recompute": "mlp"}),
    "qwen3-moe-tp2-dp2": (MOE["tp2-dp2"], {"family": "qwen3_moe"}, {}),
    "mixtral-tp2-ep2": (MOE["tp2-ep2"], {"family": "mixtral", "tied": True}, {}),
    "mixtral-ep4": (MOE["ep4"], {"family": "mixtral"}, {}),
    "mixtral-tp2-pp2": (MOE["tp2-pp2"], {"family": "mixtral"}, {}),
    "mixtral-etp2-ep2-dp4": (MOE["etp2-dp4"], {"family": "mixtral"}, {}),
    "mixtral-ep2-pp2-vpp2": (MOE["ep2-pp2-vpp2-3-layers"], {"family": "mixtral", "num_hidden_layers": 3}, {}),
}


def compare_with_hf(layout: Layout, model: dict, config: dict) -> dict:
    """Per packing: the loss summed over ranks and HF's, the worst gradient, the worst log-prob and entropy of this rank."""
    from megatron_ext.step import forward, forward_backward
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model, largest_difference, to_megatron

    reference = hf_model(**model)
    role = scenarios.make_role(reference, layout, **config)
    items = scenarios.sequences(reference.config.vocab_size)
    mine = scenarios.share(items, layout, role.state.coordinates.dp)
    hf_loss, hf_entropy, hf_gradients = scenarios.hf_gradients(reference, items, TEMPERATURE)
    expected = to_megatron(hf_gradients, role.hf, layout, torch.distributed.get_rank())
    found = {}
    for packed, count in ((True, 5), (False, 9)):  # both more than some rank has: filled up
        with role.state.current():
            for chunk in role.wrapped:
                chunk.zero_grad_buffer()
            batches = scenarios.micro_batches(mine, packed, layout, count)
            sums = forward_backward(role.wrapped, batches, scenarios.policy_loss, TEMPERATURE)
            rows = forward(role.chunks, batches, TEMPERATURE)
            worst = largest_difference(scenarios.gradients(role), expected)
        assert (sums is None) == (rows is None) == (not role.state.is_last_stage)
        outputs = (0.0, 0.0)
        if rows is not None:
            assert len(rows) == len(mine)
            outputs = tuple(_output_difference(reference, mine, rows, index) for index in (0, 1))
            sums = {name: value.item() for name, value in sums.items()} if role.state.coordinates.tp == 0 else None
        found[packed] = {
            "batches": len(batches),
            "fillers": sum(not batch.real for batch in batches),
            "sums": sums,
            "hf": (hf_loss, hf_entropy),
            "gradient": worst,
            "outputs": outputs,
        }
    return found


def _output_difference(reference, mine: list, rows: list, index: int) -> float:
    """The largest difference from HF of log-probs (index 0) or entropies (1); the first token's must be 0."""
    from tests.megatron_ext.scenarios import hf_log_probs

    worst = 0.0
    for item, row in zip(mine, rows, strict=True):
        values = row[("log_probs", "entropy")[index]]
        assert values.shape == item["tokens"].shape and values[0] == 0
        with torch.no_grad():
            expected = hf_log_probs(reference, item["tokens"], TEMPERATURE)[index]
        worst = max(worst, (values[1:] - expected).abs().max().item())
    return worst


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_log_probs_equal_hf(worlds, case: str):
    layout, model, config = CASES[case]
    results = worlds(4).run(compare_with_hf, layout, model, config, timeout=200)
    for packed in (True, False):
        ranks = [result[packed] for result in results]
        sums = [rank["sums"] for rank in ranks if rank["sums"]]
        assert len(sums) == layout.dp
        loss = sum(one["loss"] for one in sums) / sum(one["count"] for one in sums)
        hf_loss, hf_entropy = ranks[0]["hf"]
        assert loss == pytest.approx(hf_loss, rel=1e-5)
        assert sum(one["entropy"] for one in sums) == pytest.approx(hf_entropy, rel=1e-5)
        for rank in ranks:
            assert rank["gradient"][0] < 1e-5, (packed, rank["gradient"])
            assert max(rank["outputs"]) < 2e-5
        assert len({rank["batches"] for rank in ranks}) == 1
        if packed or layout.dp > 1:
            assert sum(rank["fillers"] for rank in ranks) > 0


def reject_ragged_rows(layout: Layout) -> list[str]:
    from megatron_ext.step import forward, pack
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import hf_model

    role = scenarios.make_role(hf_model(), layout)
    tokens = torch.arange(6)
    messages = []
    for lengths in ((8, 10), (9, 9)):
        with role.state.current(), pytest.raises(ValueError) as error:
            forward(role.chunks, [pack([{"tokens": tokens}], length) for length in lengths])
        messages.append(str(error.value))
    return messages


def test_rows_of_unlike_or_indivisible_length_are_refused(worlds):
    for unlike, indivisible in worlds(4).run(reject_ragged_rows, TP2_SP):
        assert "[8, 10] tokens" in unlike
        assert "9 tokens do not divide by tp=2" in indivisible


def test_pack_shifts_fields_to_the_labels_and_back():
    from megatron_ext.step import pack

    sequences = [
        {"tokens": torch.tensor([3, 4, 5]), "weight": torch.tensor([10.0, 11.0, 12.0])},
        {"tokens": torch.tensor([6, 7]), "weight": torch.tensor([20.0, 21.0])},
    ]
    batch = pack(sequences, 8)
    assert batch.tokens.tolist() == [3, 4, 5, 6, 7, 0, 0, 0]
    assert batch.labels.tolist() == [4, 5, 0, 7, 0, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.fields["weight"].tolist() == [11, 12, 0, 21, 0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.cu_seqlens.dtype == torch.int32
    assert (batch.max_seqlen, batch.lengths) == (3, [3, 2])
    assert [row.tolist() for row in batch.rows(batch.fields["weight"])] == [[0, 11, 12], [0, 21]]


def test_padding_is_cut_into_short_sequences():
    from megatron_ext.step import pack

    assert pack([{"tokens": torch.arange(10)}], 600).cu_seqlens.tolist() == [0, 10, 266, 522, 600]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one"),
        ([{"tokens": torch.arange(0)}], "none of them empty"),
        ([{"tokens": torch.arange(9)}], "do not fit"),
    ],
)
def test_pack_refuses(sequences: list, message: str):
    from megatron_ext.step import pack

    with pytest.raises(ValueError, match=message):
        pack(sequences, 8)


def test_fill_up():
    from megatron_ext.step import fill_up, pack

    batches = [
        pack(
            [
                {"tokens": torch.arange(1, 4), "loss_mask": torch.ones(3)},
                {"tokens": torch.arange(2), "loss_mask": torch.ones(2)},
            ],
            8,
        )
    ]
    assert len(fill_up(batches, DP2_PP2)) == 1
    assert len(fill_up(batches, DP2_PP2, count=3)) == 3
    filled = fill_up(batches * 3, DP2_PP2_VPP2)
    assert [batch.real for batch in filled] == [True, True, True, False]
    assert filled[-1].tokens.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert filled[-1].fields["loss_mask"].tolist() == [0.0] * 8
    with pytest.raises(ValueError, match="without a micro-batch"):
        fill_up([], DP2_PP2)


@pytest.fixture
def one_gpu():
    """A world of this process alone, over NCCL."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# every token goes to every expert: rounding cannot choose others than HF does
ALL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
# how layers may be built on a GPU: the spec, and fields of TransformerConfig
PLAIN = {"gradient_accumulation_fusion": False, "use_te_activation_func": False}
BUILDS = [("local", PLAIN), ("local", {"use_te_activation_func": False}), ("te", PLAIN), ("te", {})]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "sizes"), [("qwen2", {}), ("qwen3_moe", ALL_EXPERTS)])
def test_both_specs_in_bfloat16_are_near_hf_on_a_gpu(one_gpu, family: str, sizes: dict):
    """TE's spec where it is installed, and the local one with torch's variable-length attention; log-probs and gradients."""
    import importlib.util

    from megatron_ext.model import build_model, transformer_config
    from megatron_ext.optimizer import wrap
    from megatron_ext.parallel import ParallelState
    from megatron_ext.step import forward, forward_backward
    from tests.megatron_ext import scenarios
    from tests.megatron_ext.hf_layout import fill, hf_config, hf_model, named_parameters, to_megatron

    layout = Layout(1)
    reference = hf_model(family, hidden_size=256, intermediate_size=512, **sizes).bfloat16().float()
    hf, items = hf_config(reference), scenarios.sequences(128)
    _, _, hf_gradients = scenarios.hf_gradients(reference, items, TEMPERATURE)
    expected = to_megatron(hf_gradients, hf, layout, 0)
    state = ParallelState("actor", layout, seed=1)
    on_gpu = [{name: value.cuda() for name, value in item.items()} for item in items]
    for spec, fields in BUILDS if importlib.util.find_spec("transformer_engine") else BUILDS[:2]:
        with state.current():
            config = transformer_config(hf, layout, torch.bfloat16, overrides=fields)
            chunks = build_model(hf, layout, config, spec)
            fill(chunks, reference.state_dict(), hf, layout, 0)
            wrapped = wrap(chunks, config)
            batches = scenarios.micro_batches(on_gpu, True, layout, 5)
            forward_backward(wrapped, batches, scenarios.policy_loss, TEMPERATURE)
            rows = forward(wrapped, batches, TEMPERATURE)
        for item, row in zip(items, rows, strict=True):
            with torch.no_grad():
                log_probs, _ = scenarios.hf_log_probs(reference, item["tokens"], TEMPERATURE)
            assert (row["log_probs"][1:].cpu() - log_probs).abs().mean() < 0.05, (spec, fields)
        for name, parameter in named_parameters(wrapped):
            difference = (parameter.main_grad.cpu() - expected[name]).norm() / expected[name].norm()
            most = 0.2 if "linear_qkv.bias" in name else 0.1 if hf.is_moe else 0.05
            assert difference < most, (spec, fields, name, difference)
