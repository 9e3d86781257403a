"""What is refused before a start, with its exact message; what is fine passes."""

import json
import os
import re
import shutil
import socket

import pytest
from safetensors.numpy import save_file

from hybridflow.config import preflight
from hybridflow.config.library_fields import check_library_field
from hybridflow.config.load import load
from hybridflow.config.schema import ConfigError
from hybridflow.data.tokenizer import character_tokenizer
from tests import hf_models
from tests.config.folders import write_config, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def check(tmp_path, model, *overrides):
    preflight.check(load(write_config(tmp_path, model), list(overrides)))


def refused(tmp_path, model, *overrides) -> str:
    with pytest.raises(ConfigError) as error:
        check(tmp_path, model, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_passes(tmp_path, model):
    check(tmp_path, model)
    assert not (tmp_path / "run").exists()  # checking leaves nothing behind


@pytest.mark.parametrize(
    "overrides",
    [
        ["roles.actor={tp: 1, pp: 4}"],
        ["roles.actor={tp: 1, pp: 2, vpp: 2}"],
        ["roles.actor={tp: 1, pp: 3}", "cluster.ranks_per_node=3", "roles.rollout.tp=1"],  # 4 layers: 1, 2 and 1
        ["roles.actor.split.stages=[3,1]"],
        ["roles.actor.split={embedding: 1, loss: 1}"],
        ["roles.actor={tp: 1, pp: 2, vpp: 2, split: {by_cost: true}, overlap_grad_reduce: true}", "run.profile=true"],
        ["roles.actor={vpp: 2, megatron: {overlap_p2p_comm: false}}"],
        ["roles.actor={recompute: mlp}"],
        ["roles.actor={tp: 1, pp: 1}", "batch.prompts=7"],  # 14 samples a mini-batch over DP 4: filled up, not refused
        ["roles.rollout.tp=4", "model.path={model}"],  # 2 KV heads on 4 ranks: vLLM repeats them
        ["sampling.top_p=0.9"],  # two mini-batches: log-probs are recomputed
        ["roles.actor.ranks=[0,1,2,3]"],
        ["algorithm.name=ppo", "roles.critic.ranks=[0,1]"],
        ["algorithm.name=ppo", "roles.actor={ranks: [0,1], pp: 1}", "roles.rollout.ranks=[0-1]", "roles.critic.ranks=[2-3]"],
        ["roles.actor={ranks: [2,3], tp: 1}", "roles.rollout.ranks=['node0:[0,1]']"],
        ["batch.mini_batches=3"],  # 32 samples: 11, 11 and 10
        ["algorithm.kl_coefficient=0.1"],
        ["algorithm.kl_coefficient=0.1", "roles.actor.offload=[params,grads,optimizer]"],  # the reference has params only
        ["roles.actor={tp: 2, release_weights: always, offload: [optimizer]}", "model.dtype=bfloat16"],
        ["algorithm.name=ppo"],
        [
            "algorithm={name: ppo, value_clip: 0}",
            "roles.critic={pp: 4, offload: [params, optimizer]}",
            "batch.samples_per_prompt=1",
        ],
        ["algorithm={name: remax, kl_coefficient: 0.1, kl_target: 6}", "batch.samples_per_prompt=1"],
    ],
)
def test_passes_with(tmp_path, model, overrides):
    model4 = write_model(tmp_path / "wide", intermediate_size=128, vocab_size=256)
    check(tmp_path, model, *(text.replace("{model}", str(model4)) for text in overrides))


@pytest.mark.parametrize(
    "overrides,message",
    [
        (["algorithm.name=pppo"], "algorithm.name='pppo' is unknown: did you mean ppo?"),
        (
            ["run.trackers=[comet]"],
            "run.trackers=['comet']: 'comet' is unknown: use wandb or mlflow (JSONL and TensorBoard are always there)",
        ),
        (
            ["algorithm.name=dqn"],
            "algorithm.name='dqn' is unknown: use grpo, ppo, remax, safe_rlhf, or package.module:Class of your own",
        ),
        (
            ["algorithm.name=nowhere:Mine"],
            "algorithm.name='nowhere:Mine': importing nowhere failed: ModuleNotFoundError: No module named 'nowhere'",
        ),
        (
            ["roles.critic={pp: 2}"],
            "roles.critic would not be used by algorithm.name=grpo: leave it out, or use ppo or safe_rlhf",
        ),
        (
            ["algorithm.name=ppo", "cost.kind=last_integer"],
            "cost would not be used by algorithm.name=ppo: leave it out, or use safe_rlhf",
        ),
        (
            ["algorithm.name=safe_rlhf"],
            "algorithm.name=safe_rlhf needs costs: give the section cost a kind, or roles.cost a model",
        ),
        (
            ["algorithm={name: safe_rlhf, lambda_init: 0}", "cost.kind=last_integer"],
            "algorithm.lambda_init=0.0 is not above 0 and at most lambda_max=10.0",
        ),
        (["reward.kind=model"], "reward.kind=model needs a model that scores: give roles.reward.model.path"),
        (["reward.model_weight=0.5"], "reward.model_weight=0.5 needs a model that scores: give roles.reward.model.path"),
        (
            ["roles.reward.tp=2"],
            "roles.reward would not be used: set reward.kind=model, or reward.model_weight to add its score",
        ),
        (
            ["reward.kind=model", "roles.reward.tp=2"],
            "roles.reward.model.path is not set: give the folder of a classifier with one label",
        ),
        (
            ["reward={kind: model, model_weight: 2}", "roles.reward.model.path=m"],
            "reward.model_weight=2.0 is for a model beside another kind: leave it out",
        ),
        (
            ["reward.kind=model", "roles.reward={backend: hf, tp: 2, model: {path: m}}"],
            "roles.reward.tp=2 splits a model, but backend=hf has all of it on every rank: use 1, or"
            " roles.reward.backend=megatron",
        ),
        (
            ["reward.kind=model", "roles.reward={trust_remote_code: true, model: {path: m}}"],
            "roles.reward.trust_remote_code=true would not be used: set roles.reward.backend=hf",
        ),
        (
            ["reward={kind: http, url: 'localhost:80'}"],
            "reward.url='localhost:80' is not the address of a server, such as http://127.0.0.1:8000/score",
        ),
        (
            ["reward={kind: http, url: 'http://a b/c'}"],
            "reward.url='http://a b/c' is not the address of a server, such as http://127.0.0.1:8000/score",
        ),
        (["reward.url=http://a/b"], "reward.url=http://a/b would not be used: set reward.kind=http"),
        (["reward.retries=-1"], "reward.retries=-1 is too small: use at least 0"),
        (
            ["algorithm.name=safe_rlhf", "cost={kind: function, function: 'no.py:f'}"],
            "cost.function='no.py:f': the file no.py does not exist",
        ),
        (["algorithm={name: ppo, gae_lambda: 1.5}"], "algorithm.gae_lambda=1.5 is not in [0, 1]"),
        (["algorithm={name: ppo, gamma: -0.1}"], "algorithm.gamma=-0.1 is not in [0, 1]"),
        (["algorithm={name: ppo, value_clip: -1}"], "algorithm.value_clip=-1.0 is too small: use at least 0"),
        (
            ["algorithm={name: ppo, kl_target: 6}"],
            "algorithm.kl_target=6.0 adapts algorithm.kl_coefficient, which stays 0 once it is: give it a start, such as 0.1",
        ),
        (
            ["algorithm.name=ppo", "roles.critic={tp: 4}"],
            "roles.critic.tp=4 does not divide the model's num_key_value_heads=2: use 1 or 2",
        ),
        (
            ["algorithm.name=ppo", "roles.critic={pp: 3}"],
            "cluster.nodes=1 x cluster.ranks_per_node=4 = 4 processes are not a multiple of roles.critic.tp=1 x pp=3 x cp=1"
            " = 3: change cluster.ranks_per_node or the layout",
        ),
        (
            ["algorithm.name=ppo", "roles.critic={micro_batch_tokens: 100}"],
            "roles.critic.micro_batch_tokens=100 does not hold one sequence: sampling.max_prompt_tokens=128 +"
            " sampling.max_response_tokens=64 = 192: use at least 192",
        ),
        (
            ["algorithm.name=ppo", "roles.critic={optimizer: {lr: -1}}"],
            "roles.critic.optimizer.lr=-1.0 is too small: use at least 0",
        ),
        (
            ["algorithm.name=ppo", "roles.critic={offload: [head]}"],
            "roles.critic.offload=['head']: 'head' cannot be offloaded, the critic has params, grads, optimizer",
        ),
        (
            ["algorithm.name=ppo", "roles.critic={release_weights: always}"],
            "roles.critic.release_weights=always rebuilds 16-bit weights from float32 masters, but with dtype=float32 the"
            " weights are the masters: use roles.critic.offload=[params], or bfloat16",
        ),
        (
            ["algorithm.name=ppo", "roles.critic={ranks: [0,1], tp: 4}"],
            "roles.critic.ranks=[0, 1] = 2 ranks are fewer than roles.critic.tp=4 x pp=1 x cp=1 = 4:"
            " change roles.critic.ranks or the layout",
        ),
        (
            ["algorithm.name=ppo", "roles.critic.megatron.num_layers=8"],
            "roles.critic.megatron.num_layers follows from another key: set roles.critic.model.path instead",
        ),
        (["cluster.address=auto"], "cluster.address=auto is for Ray: set cluster.launcher=ray, or leave it out"),
        (
            ["cluster.resources={node0: {big: 1}}"],
            "cluster.resources={'node0': {'big': 1}} is for Ray: set cluster.launcher=ray, or leave it out",
        ),
        (
            ["cluster.launcher=ray", "cluster.nodes=2"],
            "cluster.nodes=2, but without cluster.address Ray is started on this machine alone: start a cluster (ray start"
            " --head, and ray start --address=HEAD:6379 on the other nodes) and set cluster.address=HEAD:6379",
        ),
        (
            ["cluster.launcher=ray", "cluster.address=ray://a:1"],
            "cluster.address=ray://a:1 is of Ray's client protocol: use HOST:PORT of the cluster, or auto",
        ),
        (
            ["cluster.launcher=ray", "cluster.address=a:1", "cluster.resources={node1: {big: 1}}"],
            "cluster.resources.node1: cluster.nodes=1 has node0",
        ),
        (
            ["cluster.launcher=ray", "cluster.address=a:1", "cluster.resources={node0: big}"],
            "cluster.resources.node0=big is not a section of amounts, such as {H200: 1}",
        ),
        (
            ["cluster.launcher=ray", "cluster.address=a:1", "cluster.resources={node0: {GPU: 1}}"],
            "cluster.resources.node0.GPU follows from cluster.ranks_per_node: leave it out",
        ),
        (
            ["cluster.launcher=ray", "cluster.address=a:1", "cluster.resources={node0: {big: 0}}"],
            "cluster.resources.node0.big=0 is not a number above 0",
        ),
        (
            ["roles.rollout.ranks=[0,1]"],
            "roles.rollout.ranks=[0, 1] leaves out rank 2, which is in one pool with it through actor (ranks 0-3): an engine"
            " needs a world of its own, so give rollout all ranks of the pool, or ranks that no other role has",
        ),
        (["roles.actor.cp=2"], "roles.actor.cp=2 is not supported yet: use 1"),
        (["run.save_every=5", "run.keep_checkpoints=-1"], "run.keep_checkpoints=-1 is too small: use at least 0"),
        (
            ["cluster.ranks_per_node=1000000000"],
            "cluster.nodes=1 x cluster.ranks_per_node=1000000000 = 1000000000 ranks are more than 65536: lower one of them",
        ),
        (["run.seed=-1"], "run.seed=-1 is no seed: use 0 to 4294967295"),
        (["data.seed=4294967296"], "data.seed=4294967296 is no seed: use 0 to 4294967295"),
        (
            ["sampling.temperature=0.001"],
            "sampling.temperature=0.001 is below 0.01, which vLLM would take instead: use at least 0.01",
        ),
        (
            ["roles.actor.optimizer={lr: 0, min_lr: 1, schedule: linear, decay_steps: 5}"],
            "roles.actor.optimizer.min_lr=1.0, down to which the rate is to decay, is above roles.actor.optimizer.lr=0.0:"
            " lower it",
        ),
        (["model.path=''"], "model.path is empty: give a path"),
        (["data={source: file, path: ''}"], "data.path is empty: give a path"),
        (
            ["run.dir=~root/x"],
            "run.dir=~root/x: only a shell knows what ~ stands for: write " + os.path.expanduser("~root/x"),
        ),
        (["run.resume=last"], "run.resume=last is no whole checkpoint (last does not exist): use auto, never, or its folder"),
        (["roles.actor.tp=0"], "roles.actor.tp=0 is too small: use at least 1"),
        (["batch.prompts=0"], "batch.prompts=0 is too small: use at least 1"),
        (["roles.actor.optimizer.lr=-1"], "roles.actor.optimizer.lr=-1.0 is too small: use at least 0"),
        (["roles.actor.optimizer.betas=[0.9]"], "roles.actor.optimizer.betas=[0.9] are not two numbers in [0, 1)"),
        (
            ["roles.actor.optimizer.schedule=cosine"],
            "roles.actor.optimizer.schedule=cosine needs decay_steps=0 above warmup_steps=0:"
            " set roles.actor.optimizer.decay_steps",
        ),
        (["roles.actor.optimizer.lr=nan"], "roles.actor.optimizer.lr=nan is not a finite number"),
        (["sampling.temperature=inf"], "sampling.temperature=inf is not a finite number"),
        (["roles.actor.optimizer.betas=[0.9,nan]"], "roles.actor.optimizer.betas[1]=nan is not a finite number"),
        (
            ["roles.actor.megatron.num_layer=8"],
            "unknown key roles.actor.megatron.num_layer: did you mean num_layers?",
        ),
        (
            ["roles.actor.megatron.attention_dropout=lots"],
            "roles.actor.megatron.attention_dropout='lots' must be float",
        ),
        (["roles.actor.megatron.bias_activation_fusion=1"], "roles.actor.megatron.bias_activation_fusion=1 must be bool"),
        (
            ["roles.rollout.engine_args.max_num_seqs=many"],
            "roles.rollout.engine_args.max_num_seqs='many' must be int or null",
        ),
        (
            ["roles.actor.megatron.num_layers=8"],
            "roles.actor.megatron.num_layers follows from another key: set roles.actor.model.path instead",
        ),
        (
            ["roles.rollout.engine_args.max_num_seq=8"],
            "unknown key roles.rollout.engine_args.max_num_seq: did you mean max_num_seqs?",
        ),
        (["roles.rollout.engine_args.max_num_seqs=0"], "roles.rollout.engine_args.max_num_seqs=0 is too small: use at least 1"),
        (
            ["roles.rollout.engine_args={max_num_seqs: 9, max_num_batched_tokens: 8}"],
            "roles.rollout.engine_args.max_num_batched_tokens=8 is below max_num_seqs=9, each of which gets a token at a time:"
            " raise the one or lower the other",
        ),
        (
            ["roles.rollout.engine_args.data_parallel_rank=1"],
            "roles.rollout.engine_args.data_parallel_rank cannot be changed: an engine inside the training processes depends"
            " on it",
        ),
        (
            ["roles.actor.megatron.autocast_dtype=x"],
            "roles.actor.megatron.autocast_dtype='x' must be Optional[torch.dtype], which a config cannot hold: leave it out",
        ),
        (
            ["roles.actor.megatron.gated_linear_unit=false"],
            "roles.actor.megatron.gated_linear_unit follows from another key: set roles.actor.model.path instead",
        ),
        (
            ["roles.actor.megatron.cpu_offloading=true"],
            "roles.actor.megatron={'cpu_offloading': True} is refused by Megatron: Currently there is no support for Pipeline"
            " parallelism with CPU offloading",
        ),
        (
            ["roles.rollout.engine_args.max_model_len=8"],
            "roles.rollout.engine_args.max_model_len is set by the trainer:"
            " use sampling.max_prompt_tokens and sampling.max_response_tokens",
        ),
        (
            ["roles.actor.micro_batch_tokens=201", "sampling.max_response_tokens=73"],
            "roles.actor.micro_batch_tokens=201 does not hold one sequence: sampling.max_prompt_tokens=128 +"
            " sampling.max_response_tokens=73 = 201: use at least 202",
        ),
        (["sampling.temperature=0"], "sampling.temperature=0.0 must be above 0: training samples are never greedy"),
        (["sampling.top_p=1.5"], "sampling.top_p=1.5 is not in (0, 1]"),
        (
            ["sampling.top_p=0.9", "batch.mini_batches=1"],
            "sampling.top_p=0.9 truncates the distribution that the rollout's log-probs refer to: use 1.0,"
            " or algorithm.old_log_probs=recompute",
        ),
        (
            ["cluster.ranks_per_node=2"],
            "cluster.nodes=1 x cluster.ranks_per_node=2 = 2 processes are fewer than roles.actor.tp=2 x pp=2 x cp=1 = 4:"
            " change cluster.ranks_per_node or the layout",
        ),
        (
            ["cluster.ranks_per_node=6"],
            "cluster.nodes=1 x cluster.ranks_per_node=6 = 6 processes are not a multiple of roles.actor.tp=2 x pp=2 x cp=1"
            " = 4: change cluster.ranks_per_node or the layout",
        ),
        (
            ["roles.rollout.expert_parallel=true"],
            "roles.rollout.expert_parallel=true needs experts, which Qwen2ForCausalLM does not have: use false",
        ),
        (
            ["roles.rollout.engine_args.moe_backend=auto"],
            "roles.rollout.engine_args.moe_backend cannot be changed: an engine inside the training processes depends on it",
        ),
        (["roles.rollout.tp=3"], "roles.rollout.tp=3 does not divide cluster.ranks_per_node=4: use 1, 2 or 4"),
        (
            ["roles.actor={tp: 4, pp: 1}"],
            "roles.actor.tp=4 does not divide the model's num_key_value_heads=2: use 1 or 2",
        ),
        (
            ["roles.actor={tp: 3, pp: 1}", "cluster.ranks_per_node=3", "roles.rollout.tp=1"],
            "roles.actor.tp=3 does not divide the model's num_attention_heads=4: use 1 or 2",
        ),
        (
            ["roles.actor.vpp=4"],
            "roles.actor: num_hidden_layers=4 is too few for the 8 chunks of pp=2 x vpp=4: lower one of them",
        ),
        (
            ["roles.actor.megatron.overlap_p2p_comm=true"],
            "roles.actor.megatron.overlap_p2p_comm=true needs the interleaved schedule, but roles.actor.vpp=1:"
            " use vpp=2 or more, or false",
        ),
        (
            ["roles.actor={vpp: 2, megatron: {overlap_p2p_comm: false, overlap_p2p_comm_warmup_flush: true}}"],
            "roles.actor.megatron.overlap_p2p_comm_warmup_flush=true overlaps the rest of what"
            " roles.actor.megatron.overlap_p2p_comm=false does not overlap: leave out one of them",
        ),
        (
            ["roles.actor.megatron.deallocate_pipeline_outputs=true"],
            "roles.actor.megatron.deallocate_pipeline_outputs follows from another key:"
            " set roles.actor.megatron.overlap_p2p_comm instead",
        ),
        (
            ["roles.reference={pp: 2, megatron: {microbatch_group_size_per_vp_stage: 4}}", "algorithm.kl_coefficient=0.1"],
            "roles.reference.megatron.microbatch_group_size_per_vp_stage cannot be chosen: micro-batches go through the chunks"
            " in groups of pp",
        ),
        (
            ["roles.actor.split={by_cost: true, loss: 2}"],
            "roles.actor.split.by_cost=true derives what roles.actor.split.loss=2 gives: leave out one of them",
        ),
        (
            ["roles.actor.split.stages=[2,3]"],
            "roles.actor: split.stages=[2, 3] are 5 layers, but num_hidden_layers=4: make them equal",
        ),
        (
            ["roles.actor={vpp: 2, split: {stages: [3, 1]}}"],
            "roles.actor: split.stages=[3, 1] has 2 numbers, but pp=2 x vpp=2 = 4 chunks: give one for each",
        ),
        (
            ["roles.reference={pp: 4, split: {stages: [2, 0, 1, 1]}}"],
            "roles.reference: split.stages=[2, 0, 1, 1]: only the first and the last number may be 0, and none below",
        ),
        (
            ["roles.actor.megatron.account_for_loss_in_pipeline_split=true"],
            "roles.actor.megatron.account_for_loss_in_pipeline_split follows from another key:"
            " set roles.actor.split.loss instead",
        ),
        (
            ["roles.actor={tp: 2, pp: 1, vpp: 2}"],
            "roles.actor.vpp=2 needs a pipeline, but roles.actor.pp=1: use vpp=1 or a larger pp",
        ),
        (
            ["batch.mini_batches=33"],
            "batch.mini_batches=33 is more than the 32 samples of a step (batch.prompts=8 x batch.samples_per_prompt=4)",
        ),
        (
            ["batch.samples_per_prompt=1"],
            "batch.samples_per_prompt=1 gives no advantage, since grpo compares the samples of a prompt: use at least 2",
        ),
        (
            ["sampling.max_response_tokens=200"],
            "sampling.max_prompt_tokens=128 + sampling.max_response_tokens=200 = 328 is more than the model's"
            " max_position_embeddings=256: lower one of them",
        ),
        (
            ["roles.actor.micro_batch_tokens=100"],
            "roles.actor.micro_batch_tokens=100 does not hold one sequence: sampling.max_prompt_tokens=128 +"
            " sampling.max_response_tokens=64 = 192: use at least 192",
        ),
        (
            ["roles.actor.offload=[weights]"],
            "roles.actor.offload=['weights']: 'weights' cannot be offloaded, the actor has params, grads, optimizer",
        ),
        (
            ["roles.reference.offload=[params,optimizer]"],
            "roles.reference.offload=['params', 'optimizer']: 'optimizer' cannot be offloaded, the reference is never trained:"
            " use [params]",
        ),
        (
            ["roles.actor.release_weights=always"],
            "roles.actor.release_weights=always rebuilds 16-bit weights from float32 masters, but with dtype=float32 the"
            " weights are the masters: use roles.actor.offload=[params], or bfloat16",
        ),
        (
            ["roles.actor={tp: 2, release_weights: always, offload: [params]}", "model.dtype=bfloat16"],
            "roles.actor.offload=['params'] copies the weights that roles.actor.release_weights=always rebuilds:"
            " leave out params, or use release_weights=never",
        ),
        (
            ["roles.actor.megatron.tensor_model_parallel_size=2"],
            "roles.actor.megatron.tensor_model_parallel_size follows from another key: set roles.actor.tp instead",
        ),
        (
            ["roles.rollout.engine_args.dtype=half"],
            "roles.rollout.engine_args.dtype follows from another key: set roles.rollout.dtype instead",
        ),
        (
            ["data.prompt_template='{question} {hint}'"],
            "data.prompt_template='{question} {hint}' has no field 'hint' to fill in: there are ['answer', 'difficulty',"
            " 'expression', 'num_digits', 'num_terms', 'question', 'source_dataset', 'source_index']",
        ),
        (
            ["data.response_template=same"],
            "data.response_template='same' is the same for all problems: use a field, such as {question}",
        ),
        (["reward={kind: function, function: f.py}"], "reward.function='f.py' must look like path/to/file.py:name"),
        (["reward={kind: function, function: 'no.py:f'}"], "reward.function='no.py:f': the file no.py does not exist"),
        (
            ["data={source: file, path: x.jsonl}"],
            "reward.kind=task is a task's own scorer, but data.source=file has none: use last_integer or function",
        ),
        (["data={source: file, path: x.csv}", "reward.kind=last_integer"],
         "data.path=x.csv does not exist"),
        (["data={source: file, path: x.jsonl}", "reward.kind=last_integer"], "data.path=x.jsonl does not exist"),
        (
            ["data.task=chain_sun"],
            "data.task='chain_sun' is no task of reasoning_gym: did you mean chain_sum, decimal_chain_sum?",
        ),
        (
            ["data.options={terms: 2}"],
            "data.options.terms is not an option of chain_sum:"
            " there are allow_negation, max_digits, max_terms, min_digits, min_terms, size",
        ),
    ],
)  # fmt: skip
def test_refuses(tmp_path, model, overrides, message):
    assert refused(tmp_path, model, *overrides) == message


def test_rollout_vocabulary(tmp_path):
    odd = write_model(tmp_path / "odd", vocab_size=65, num_attention_heads=3, num_key_value_heads=3)  # pads to 128
    overrides = ["cluster.ranks_per_node=3", "roles={actor: {tp: 1, pp: 1}, rollout: {tp: 3}}"]
    assert refused(tmp_path, odd, *overrides) == (
        "roles.rollout.tp=3 cannot split this model (num_attention_heads=3, num_key_value_heads=3, intermediate_size=96,"
        " padded vocab_size=128): use one of 1"
    )


def test_torchrun_with_another_number_of_processes(tmp_path, model, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(tmp_path, model) == (
        "torchrun started 2 processes, but cluster.nodes=1 x cluster.ranks_per_node=4 = 4: start 4, or change these keys"
    )


class TestModelFolder:
    def test_missing(self, tmp_path):
        folder = tmp_path / "none"
        assert refused(tmp_path, folder) == f"model folder {folder} does not exist: give a folder in HF format"

    def test_unsupported_architecture(self, tmp_path, model):
        folder = write_model(tmp_path / "m")
        (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
        assert "architecture GPT2LMHeadModel is not supported: use one of" in refused(tmp_path, folder)

    def test_rope_scaling_is_refused_by_name(self, tmp_path):
        folder = write_model(tmp_path / "m")
        config = json.loads((folder / "config.json").read_text()) | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
        (folder / "config.json").write_text(json.dumps(config))
        assert "rope_scaling of type 'llama3' is not supported" in refused(tmp_path, folder)

    def test_no_safetensors(self, tmp_path):
        folder = write_model(tmp_path / "m")
        (folder / "model.safetensors").unlink()
        assert refused(tmp_path, folder) == (
            f"model folder {folder} has no safetensors: it needs model.safetensors or model.safetensors.index.json"
        )

    def test_shards(self, tmp_path):
        folder = write_model(tmp_path / "m", shards=3)
        check(tmp_path, folder)
        (folder / "model-00002-of-00003.safetensors").unlink()
        assert refused(tmp_path, folder) == (
            f"model folder {folder} lacks model-00002-of-00003.safetensors (1 of 3 shards in its index are missing)"
        )

    def test_truncated(self, tmp_path):
        folder = write_model(tmp_path / "m")
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-5])
        assert refused(tmp_path, folder) == (
            f"{folder}/model.safetensors is not a complete safetensors file"
            f" ({len(data) - 5} bytes, not {len(data)}): copy it again"
        )
        (folder / "model.safetensors").write_bytes(b"abc")
        assert "is not a complete safetensors file (3 bytes)" in refused(tmp_path, folder)

    @pytest.mark.parametrize("header", [b"[1, 2]", b'{"a": {"dtype": "F32"}}', b'{"a": {"shape": [1], "data_offsets": 3}}'])
    def test_a_header_of_another_kind(self, tmp_path, header):
        folder = write_model(tmp_path / "m")
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert "model.safetensors is not a safetensors file" in refused(tmp_path, folder)

    @pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 1, "b": "x"}}'])
    def test_an_index_of_another_kind(self, tmp_path, index):
        folder = write_model(tmp_path / "m")
        (folder / "model.safetensors.index.json").write_text(index)
        assert "model.safetensors.index.json is not an index of safetensors files" in refused(tmp_path, folder)

    @pytest.mark.parametrize("config", [b"[]", b"{", b"\xff"])
    def test_a_config_of_another_kind(self, tmp_path, config):
        folder = write_model(tmp_path / "m")
        (folder / "config.json").write_bytes(config)
        assert refused(tmp_path, folder).startswith(f"{folder}/config.json ")

    def test_tensors_that_do_not_fit_the_config(self, tmp_path):
        folder = write_model(tmp_path / "m")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
        assert f"model folder {folder} lacks the tensor model.layers.4." in refused(tmp_path, folder)
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 111}))
        assert refused(tmp_path, folder) == (
            f"model folder {folder}: model.embed_tokens.weight has shape [110, 64], but config.json asks for [111, 64]"
        )

    def test_weights_that_the_config_has_no_place_for(self, tmp_path):
        folder = write_model(tmp_path / "m")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
        assert refused(tmp_path, folder) == (
            f"model folder {folder} has the tensor model.layers.2.input_layernorm.weight, which its config.json has no place"
            " for (architectures=Qwen2ForCausalLM, num_hidden_layers=2): is it of another model?"
        )
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
        assert "has the tensor model.layers.0.self_attn.k_proj.bias, which" in refused(tmp_path, folder)
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
        assert "model_type='llama', but Qwen2ForCausalLM is of qwen2" in refused(tmp_path, folder)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "model_type"}))
        assert "field model_type is missing: it is 'qwen2' of Qwen2ForCausalLM" in refused(tmp_path, folder)

    def test_weights_of_another_kind(self, tmp_path):
        folder = write_model(tmp_path / "m")
        file = folder / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data.replace(b'"F32"', b'"I32"'))
        assert "is of dtype I32: use one of F64, F32, F16, BF16" in refused(tmp_path, folder)
        file.write_bytes(data.replace(b'"F32"', b'"F64"'))
        assert re.search(r"of shape \[.*\] and F64 has \d+ bytes: copy it again", refused(tmp_path, folder))

    def test_an_index_that_names_the_wrong_file(self, tmp_path):
        folder = write_model(tmp_path / "m", shards=2)
        index = folder / "model.safetensors.index.json"
        placed = json.loads(index.read_text())["weight_map"]
        name = "model.norm.weight"
        other = next(file for file in placed.values() if file != placed[name])
        index.write_text(json.dumps({"weight_map": placed | {name: other}}))
        assert f"by model.safetensors.index.json, {name} is in {other}, which lacks it: copy both" in refused(tmp_path, folder)
        index.write_text(json.dumps({"weight_map": {k: v for k, v in placed.items() if k != name}}))
        assert f"lacks the tensor {name}" in refused(tmp_path, folder)

    def test_a_link_to_nothing(self, tmp_path):
        folder = write_model(tmp_path / "m")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to("../blobs/abc")
        text = f"{folder}/model.safetensors is a link to ../blobs/abc, which is not there: copy what it stands for"
        assert refused(tmp_path, folder) == text

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("generation_config.json", "{", "generation_config.json cannot be read"),
            (
                "generation_config.json",
                '{"eos_token_id": "2"}',
                "eos_token_id has the number '2', which is none of the model's vocab_size=110",
            ),
            ("generation_config.json", '{"eos_token_id": [1, 500]}', "eos_token_id has the number 500, which is none of"),
            ("tokenizer_config.json", "null", "has a tokenizer that cannot be loaded (AttributeError: "),
            ("tokenizer_config.json", '{"eos_token": 5}', "has a tokenizer that cannot be loaded ("),
        ],
    )
    def test_what_is_read_once_the_roles_are_built(self, tmp_path, name, text, message):
        folder = write_model(tmp_path / "m")
        (folder / name).write_text(text)
        assert message in refused(tmp_path, folder)

    def test_tokens_beyond_the_vocabulary(self, tmp_path):
        folder = write_model(tmp_path / "m", vocab_size=103)
        check(tmp_path, folder, "warm_start.steps=1")
        fields = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"eos_token": "<end>"}))
        text = "eos_token has the number 103, which is none of the model's vocab_size=103 tokens: mend it"
        assert refused(tmp_path, folder) == f"model folder {folder}: its tokenizer's {text}"
        (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"eos_token": None}))
        assert "has no end-of-text token, with which a taught response ends" in refused(tmp_path, folder, "warm_start.steps=1")
        small = write_model(tmp_path / "small", vocab_size=40)
        text = refused(tmp_path, small)
        assert re.search(r"its tokenizer's token '.' has the number \d+, but config.json's vocab_size=40: are they of", text)

    def test_untied_needs_an_output_layer(self, tmp_path):
        folder = write_model(tmp_path / "m")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        assert "lacks the tensor lm_head.weight" in refused(tmp_path, folder)

    def test_no_tokenizer(self, tmp_path):
        folder = write_model(tmp_path / "m")
        (folder / "tokenizer.json").unlink()
        assert "has no tokenizer" in refused(tmp_path, folder)

    def test_a_critics_own_model(self, tmp_path, model):
        ppo = ["algorithm.name=ppo"]
        untied = write_model(tmp_path / "untied", tie_word_embeddings=False, num_hidden_layers=2)
        check(tmp_path, model, *ppo, f"roles.critic.model.path={untied}")
        config = json.loads((untied / "config.json").read_text()) | {"architectures": ["Qwen2ForTokenClassification"]}
        (untied / "config.json").write_text(json.dumps(config | {"id2label": {"0": "value"}}))
        message = f"model folder {untied} lacks the tensor score.weight, which its config.json asks for"
        assert refused(tmp_path, model, *ppo, f"roles.critic.model.path={untied}") == message
        assert "architecture Qwen2ForTokenClassification is not supported" in refused(tmp_path, untied)
        (untied / "config.json").write_text(json.dumps(config))
        assert "Qwen2ForTokenClassification with 2 labels is not a value model, which has 1 (id2label)" in refused(
            tmp_path, model, *ppo, f"roles.critic.model.path={untied}"
        )

    def test_a_reward_models_folder(self, tmp_path, model):
        folder = tmp_path / "reward"
        asked = ["reward.kind=model", f"roles.reward.model.path={folder}"]
        assert refused(tmp_path, model, *asked).startswith(f"model folder {folder} does not exist")
        hf_models.make_classifier(folder, "qwen2", vocab_size=110, max_position_embeddings=256)
        character_tokenizer("0123456789+-=").save_pretrained(folder)
        for backend in ("megatron", "hf"):
            check(tmp_path, model, *asked, f"roles.reward.backend={backend}")
        message = (
            f"roles.reward.model.path={folder} has other tokens than the actor's {model}: use roles.reward.retokenize=auto"
        )
        assert refused(tmp_path, model, *asked, "roles.reward.retokenize=never") == message
        assert "architecture Qwen2ForCausalLM is not supported: use one of LlamaForSequenceClassification, Qwen2For" in refused(
            tmp_path, model, "reward.kind=model", f"roles.reward.model.path={model}"
        )
        text = refused(tmp_path, model, "reward.kind=model", f"roles.reward={{backend: hf, model: {{path: {model}}}}}")
        assert text.endswith(f"{model} has 2 labels, a model that scores has 1 (id2label)")
        tensors = {name: tensor.numpy() for name, tensor in hf_models.state(folder).items() if name != "score.weight"}
        save_file(tensors, folder / "model.safetensors")
        text = f"model folder {folder} lacks the tensor score.weight"
        assert refused(tmp_path, model, *asked) == f"{text}, which its config.json asks for"
        assert text in refused(tmp_path, model, *asked, "roles.reward.backend=hf")
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 64}))
        for backend in ("megatron", "hf"):
            text = refused(tmp_path, model, *asked, f"roles.reward.backend={backend}")
            assert text.endswith("= 192 is more than the reward's max_position_embeddings=64: lower one of them")
        (folder / "config.json").write_text(json.dumps(fields | {"id2label": {"0": "bad", "1": "good"}}))
        text = "Qwen2ForSequenceClassification with 2 labels is not a reward model, which has 1 (id2label)"
        assert text in refused(tmp_path, model, *asked)

    def test_a_critic_reads_the_actors_tokens(self, tmp_path, model):
        other = write_model(tmp_path / "other")
        character_tokenizer("0123456789+-=").save_pretrained(other)
        assert refused(tmp_path, model, "algorithm.name=ppo", f"roles.critic.model.path={other}") == (
            f"roles.critic.model.path={other} has other tokens than the actor's {model}: use a model with the same tokenizer"
        )

    def test_a_critic_for_shorter_sequences(self, tmp_path, model):
        short = write_model(tmp_path / "short", max_position_embeddings=100)
        text = refused(tmp_path, model, "algorithm.name=ppo", f"roles.critic.model.path={short}")
        assert text.endswith("= 192 is more than the critic's max_position_embeddings=100: lower one of them")

    def test_a_roles_own_model(self, tmp_path, model):
        text = refused(tmp_path, model, "roles.reference.model.path=missing")
        assert text == "model folder missing does not exist: give a folder in HF format"


class TestRunFolder:
    def test_holds_a_run(self, tmp_path, model):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("{}\n")
        assert refused(tmp_path, model) == (
            f"run.dir={folder} holds a run already (metrics.jsonl): set run.overwrite=true to delete it, or another run.dir"
        )
        check(tmp_path, model, "run.overwrite=true")
        assert (folder / "metrics.jsonl").exists()  # the check itself deletes nothing
        preflight.check(load(tmp_path / "config.yaml"), run_folder=False)

    def test_an_empty_folder_is_fine(self, tmp_path, model):
        (tmp_path / "run").mkdir()
        check(tmp_path, model)

    def test_a_file_in_the_way(self, tmp_path, model):
        (tmp_path / "file").write_text("")
        text = refused(tmp_path, model, f"run.dir={tmp_path}/file/run")
        assert text == f"run.dir={tmp_path}/file/run: {tmp_path}/file is a file: choose another run.dir"

    @pytest.mark.parametrize(
        ("folder", "message"),
        [
            ("''", "run.dir is empty: give a path"),
            (".", "run.dir=. names no folder of its own: choose another run.dir"),
            ("/", "run.dir=/ names no folder of its own: choose another run.dir"),
            ("{}/dangling", "run.dir={}/dangling is a link to /nowhere/at/all, which is not there: choose another run.dir"),
        ],
    )
    def test_no_folder(self, tmp_path, model, folder, message):
        (tmp_path / "dangling").symlink_to("/nowhere/at/all")
        assert refused(tmp_path, model, "run.dir=" + folder.format(tmp_path)) == message.format(tmp_path)

    def test_a_name_that_is_too_long(self, tmp_path, model):
        text = refused(tmp_path, model, f"run.dir={tmp_path}/{'x' * 300}")
        assert text.endswith("cannot be looked at (File name too long): give another path")

    def test_cannot_be_written(self, tmp_path, model):
        text = refused(tmp_path, model, "run.dir=/proc/hybridflow/run")  # not even root writes there
        assert re.fullmatch(r"run\.dir=/proc/hybridflow/run cannot be written \(/proc: .*\): choose another run\.dir", text)


class TestData:
    def test_columns(self, tmp_path, model):
        file = tmp_path / "x.jsonl"
        file.write_text("".join(json.dumps({"question": f"{n}+1", "answer": f"{n + 1}"}) + "\n" for n in range(9)))
        source = [f"data={{source: file, path: '{file}'}}", "reward.kind=last_integer", "evaluation.problems=4"]
        missing = f"{file}, row 1: no column 'prompt' (data.prompt_key): there are answer, question"
        assert refused(tmp_path, model, *source) == missing
        source.append("data.prompt_key=question")
        check(tmp_path, model, *source)
        assert refused(tmp_path, model, *source, "evaluation.problems=10") == (
            f"{file} has 9 distinct questions within sampling.max_prompt_tokens=128, fewer than evaluation.problems=10"
        )
        file.write_text("not json\n")
        assert f"{file}, line 1: not valid JSON" in refused(tmp_path, model, *source)

    @pytest.mark.parametrize(
        ("row", "overrides", "message"),
        [
            ({"prompt": "  "}, [], "row 8: column 'prompt' (data.prompt_key) is empty"),
            ({"prompt": "7 \u00e9"}, [], "the tokenizer has no token for ['\u00e9']"),
            ({"answer": "word"}, [], "reward.kind=last_integer needs integer answers, not 'word'"),
            ({}, ["data.prompt_template='{hint}'"], "row 8: data.prompt_template='{hint}' has no field 'hint' to fill in"),
            ({"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}, [], "needs a chat template"),
        ],
    )
    def test_one_row_of_many(self, tmp_path, model, row, overrides, message):
        rows = [{"prompt": f"{n}+1", "answer": n + 1, "hint": "h"} for n in range(20)]
        rows[7] = {"prompt": "7+1", "answer": 8} | row
        file = tmp_path / "x.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = [f"data={{source: file, path: '{file}'}}", "reward.kind=last_integer", "evaluation.problems=0"]
        assert message in refused(tmp_path, model, *source, *overrides)

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{% for %}", "the model's chat template refuses messages of user (Expected an expression"),
            (
                "{{ raise_exception('no') }}",
                "refuses messages of user (no): change the data, data.system_prompt, or",
            ),
        ],
    )
    def test_a_chat_template_that_refuses(self, tmp_path, template, message):
        folder = write_model(tmp_path / "m")
        (folder / "chat_template.jinja").write_text(template)
        assert message in refused(tmp_path, folder)

    @pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
    def test_json_that_python_cannot_hold(self, tmp_path, model, text):
        file = tmp_path / "x.jsonl"
        file.write_text(text + "\n")
        source = [f"data={{source: file, path: '{file}'}}", "reward.kind=last_integer"]
        assert f"{file}, line 1: not valid JSON" in refused(tmp_path, model, *source)

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("def score(prompt): return 1.0", "it takes (prompt) (too many positional arguments)"),
            ("def score(prompt, *, response, answer, metadata): return 1", "it takes (prompt, *, response, answer, metadata)"),
            ("async def score(prompt, response, answer, metadata): return 1.0", "it is async"),
        ],
    )
    def test_a_reward_function_that_could_not_be_called(self, tmp_path, model, code, message):
        file = tmp_path / "rewards.py"
        file.write_text(code + "\n")
        text = refused(tmp_path, model, f"reward={{kind: function, function: '{file}:score'}}")
        assert f"score cannot be called as score(prompt, response, answer, metadata): {message}" in text

    def test_a_reward_server(self, tmp_path, model):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"http://127.0.0.1:{server.getsockname()[1]}/score"
            check(tmp_path, model, f"reward={{kind: http, url: '{address}'}}")
        text = refused(tmp_path, model, f"reward={{kind: http, url: '{address}'}}")
        assert text.startswith(f"reward.url={address}: no server answers at 127.0.0.1 port ") and "start it first" in text

    def test_a_path_that_would_not_be_used(self, tmp_path, model):
        assert refused(tmp_path, model, "data.path=x.jsonl") == "data.path=x.jsonl would not be used: set data.source=file"

    def test_reward_function(self, tmp_path, model):
        file = tmp_path / "rewards.py"
        file.write_text("def score(prompt, response, answer, metadata): return 1.0\n")
        check(tmp_path, model, f"reward={{kind: function, function: '{file}:score'}}")
        assert "has no function scores" in refused(tmp_path, model, f"reward={{kind: function, function: '{file}:scores'}}")
        ending = tmp_path / "ending.py"
        ending.write_text("import sys\nsys.exit(0)\n")
        assert "ending.py failed: SystemExit: 0" in refused(
            tmp_path, model, f"reward={{kind: function, function: '{ending}:f'}}"
        )
        assert refused(tmp_path, model, f"reward={{kind: task, function: '{file}:score'}}") == (
            f"reward.function={file}:score would not be used: set reward.kind=function"
        )

    def test_the_last_integer_needs_integer_answers(self, tmp_path, model):
        file = tmp_path / "x.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"p{n}", "answer": "word"}) + "\n" for n in range(9)))
        overrides = [f"data={{source: file, path: '{file}'}}", "evaluation.problems=0"]
        text = refused(tmp_path, model, *overrides, "reward.kind=last_integer")
        assert text == "reward.kind=last_integer needs integer answers, not 'word': use task or function"
        (tmp_path / "f.py").write_text("def score(prompt, response, answer, metadata):\n    return 0.0\n")
        check(tmp_path, model, *overrides, f"reward={{kind: function, function: '{tmp_path}/f.py:score'}}")

    def test_a_broken_tokenizer(self, tmp_path):
        folder = write_model(tmp_path / "m")
        (folder / "tokenizer.json").write_text("{}")
        assert f"model folder {folder} has a tokenizer that cannot be loaded" in refused(tmp_path, folder)


class TestDevices:
    def test_fewer_gpus_than_ranks(self, tmp_path, model, monkeypatch):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        config = load(write_config(tmp_path, model), ["cluster.device=auto"])
        with pytest.raises(ConfigError, match=r"^cluster\.ranks_per_node=4 but torch can use 2 GPUs on this machine"):
            preflight.check_devices(config)

    def test_auto(self, tmp_path, model, monkeypatch):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
        assert preflight.check_devices(load(write_config(tmp_path, model), ["cluster.device=auto"])) == "cpu"
        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
        assert preflight.check_devices(load(write_config(tmp_path, model), ["cluster.device=auto"])) == "cuda"

    @pytest.mark.parametrize(
        ("key", "message"),
        [
            ("engine_args.block_size=7", "block_size=7 is not a multiple of 32, as vLLM's attention on CPU has it"),
            ("engine_args.max_num_batched_tokens=9", "=9 is below the 192 tokens of the longest sequence"),
            ("gpu_memory_utilization=1e-9", "ranks on a host of .* GB, but one sequence of 192 tokens takes 196,608: raise it"),
            ("engine_args.kv_cache_memory_bytes=9", "kv_cache_memory_bytes=9 leaves 9 bytes for the KV cache"),
        ],
    )
    def test_an_engine_on_cpu_without_room(self, tmp_path, model, key, message):
        with pytest.raises(ConfigError, match=message):
            preflight.check_devices(load(write_config(tmp_path, model), [f"roles.rollout.{key}"]))

    def test_head_size_on_cpu(self, tmp_path):
        odd = write_model(tmp_path / "odd", head_dim=48)
        with pytest.raises(ConfigError, match="head size 48 is not one of vLLM's on CPU"):
            preflight.check_devices(load(write_config(tmp_path, odd)))


def test_a_disk_without_room_for_the_trained_model(tmp_path, monkeypatch):
    path = write_config(tmp_path, write_model(tmp_path / "model"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=101 << 20))
    preflight.check(load(path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=100 << 20))
    with pytest.raises(
        ConfigError, match=r"run: 0\.10 GB are free there, but the trained model takes 0\.00 GB and the rest about 0\.1"
    ):
        preflight.check(load(path))


@pytest.mark.parametrize(("value", "fits"), [("auto", True), ("fp99", False)])
def test_literals_that_vllm_names_elsewhere(value, fits):
    if fits:
        check_library_field("roles.rollout.engine_args", "kv_cache_dtype", value)
        return
    with pytest.raises(ConfigError, match="^roles.rollout.engine_args.kv_cache_dtype='fp99' must be 'auto' or "):
        check_library_field("roles.rollout.engine_args", "kv_cache_dtype", value)
