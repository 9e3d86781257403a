"""Every key of a configuration file, with its type, its default and what it means.

The dataclasses are OmegaConf structured configs: `load.py` fills them from YAML and overrides. Imports no torch, so that a
wrong key is reported at once.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from omegaconf import MISSING

from hybridflow.controller.placement import Ranks, parse_ranks
from megatron_ext.hf_config import HFConfig
from megatron_ext.layout import Layout, Split

ALGORITHMS = ("grpo", "ppo", "remax", "safe_rlhf")
ALGORITHM_METHODS = ("prepare", "step")  # of a class of the user's own
TRACKERS = {"wandb": "wandb>=0.31", "mlflow": "mlflow>=3.10"}  # what pip is to be asked for
_TRAINED_METHODS = ("start_training", "update", "make_room", "release_weights", "restore", "export")
ROLE_METHODS = {  # that a run calls, of a class of the user's own
    "actor": ("log_probs", *_TRAINED_METHODS),
    "critic": ("values", "copy_from", *_TRAINED_METHODS),
    "reference": ("log_probs", "copy_from"),
}
Dtype = Literal["float32", "bfloat16"]
# What stands on the last layer of a role's model (HFConfig.head), where it is not an output layer over the vocabulary
_HEADS = {"critic": "value", "cost_critic": "value", "reward": "score", "cost": "score"}


class ConfigError(ValueError):
    """The configuration or an input that it names is wrong; the message is one line that says which key to change."""


def one_line(error: Exception) -> str:
    """What an exception says, for a ConfigError's single line."""
    return " ".join(str(error).split())


def free() -> Any:
    """A section whose keys belong to another library or to a task."""
    return field(default_factory=dict)


@dataclass
class ModelConfig:
    path: str = MISSING  # a folder in HF format
    dtype: Dtype = "bfloat16"  # of the weights in training and in the rollout engine; optimizers keep float32 masters


@dataclass
class ModelOverride:
    """A role's own model; what is left out is taken from `model`."""

    path: str | None = None
    dtype: Dtype | None = None


@dataclass
class ClusterConfig:
    launcher: Literal["torchrun", "ray"] = "torchrun"
    nodes: int = 1
    ranks_per_node: int = 1  # processes on a node: one per GPU
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda where there are GPUs, and on a Ray cluster with an address
    # launcher ray: the cluster to join, such as auto (the one of this machine) or 10.0.0.1:6379; empty: a Ray of the job's own,
    # which only this machine can reach
    address: str = ""
    # launcher ray with an address: what nodes must have besides CPUs and GPUs, in the amounts that are taken:
    # {node0: {H200: 1}, node1: {A100: 1}} of Ray's custom resources puts the ranks of node0 on a node with H200
    resources: dict[str, Any] = free()


@dataclass
class OptimizerConfig:
    lr: float = 1.0e-6
    grad_clip: float = 1.0  # largest norm of the whole gradient; 0: no clipping
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1.0e-8
    warmup_steps: int = 0  # optimizer steps over which the learning rate rises from 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int = 0  # optimizer steps until min_lr, warm-up included; needed by linear and cosine
    min_lr: float = 0.0


@dataclass
class SplitConfig:
    """How many layers each pipeline stage gets: by default as even as possible, where the stage with the output layer gets the
    fewest and the one with the embedding the next fewest (30 layers over pp=4: 7, 8, 8, 7). `--dry-run` shows the outcome."""

    embedding: int = 0  # layers that the embedding counts as, on the first stage
    loss: int = 0  # layers that the output layer and the loss count as, on the last stage
    by_cost: bool = False  # derive `loss`: the layers that take as many operations as the output layer, rounded
    # the layers of every stage, instead of an even split: [7, 8, 8, 7]; with vpp > 1 of every chunk, in the model's order: the
    # first chunk of every stage, then the second of every stage, ... The first and the last number may be 0
    stages: list[int] = field(default_factory=list)


@dataclass
class MegatronRoleConfig:
    """A role that lives in Megatron-core: where, in which layout, and how much it takes at once."""

    # all | [0, 1] or ["0-3"] | ["node0:[0,1]", ...] (controller/placement.py). Roles may share their ranks, or some of them
    ranks: Any = "all"
    # a class of your own in place of the one in hybridflow/roles, usually derived from it, in the working directory or where
    # Python finds packages: package.module:Class. Its remote methods declare a transfer protocol (controller/protocols.py)
    implementation: str = ""
    tp: int = 1
    pp: int = 1
    vpp: int = 1  # model chunks per pipeline stage (interleaved schedule when > 1)
    split: SplitConfig = field(default_factory=SplitConfig)
    cp: int = 1
    ep: int = 1  # ranks that share the experts of a layer; ep x etp must divide the ranks of a pipeline stage
    etp: int = 1  # ranks that share the matrices of an expert, whatever tp is
    sequence_parallel: bool = False  # takes effect where tp > 1; models with experts need it there
    recompute: Literal["none", "selective", "mlp", "full"] = "none"
    # what rests in page-locked host memory while it is not needed. Of actor and critic, while the rollout engine is awake:
    # params, grads (carry nothing over, so that they are dropped only), optimizer; of the reference and of models that
    # score, outside their own calls: params
    offload: list[str] = field(default_factory=list)
    forward_micro_batch_tokens: int = 16384  # tokens of a packed micro-batch without backward
    model: ModelOverride | None = None
    dtype: Dtype | None = None
    megatron: dict[str, Any] = free()  # fields of TransformerConfig


@dataclass
class TrainedConfig(MegatronRoleConfig):
    # 16-bit weights while the rollout engine is awake: always dropped, and rebuilt bit for bit from the optimizer's float32
    # masters before their next use; never; or (auto) where engine and training would not fit on the GPU together, which
    # `--dry-run` shows. The gradients go whenever the weights do, and under auto before them
    release_weights: Literal["auto", "always", "never"] = "auto"
    micro_batch_tokens: int = 8192  # tokens of a packed micro-batch with backward
    # reduce gradients over data-parallel ranks while the last micro-batch's backward pass still runs; not with experts
    overlap_grad_reduce: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class ActorConfig(TrainedConfig):
    pass


@dataclass
class CriticConfig(TrainedConfig):
    """A model with a value head. Where it has the actor's model it starts as a copy of the policy after the warm start, its
    head at zero; `model.path` may name another model's folder, or that of a value model with its head (transformers' token
    classification with one label). Its micro-batches, optimizer, layout and dtype are its own."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-5))


@dataclass
class ReferenceConfig(MegatronRoleConfig):
    pass


@dataclass
class RewardModelConfig(MegatronRoleConfig):
    """A trained classifier with one label (transformers' sequence classification) that scores whole sequences: a reward or a
    cost model. `model.path` names its folder."""

    # megatron: a Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral classifier in any layout; hf: any classifier that transformers loads
    # from safetensors, whole on each of its ranks
    backend: Literal["megatron", "hf"] = "megatron"
    trust_remote_code: bool = False  # backend hf: run Python code that the model's folder brings
    # decode and encode a sequence anew for the model, with its own chat template if it has one: where its tokenizer has another
    # vocabulary than the actor's (auto), always, or never
    retokenize: Literal["auto", "always", "never"] = "auto"


@dataclass
class RolloutConfig:
    """vLLM in the training processes, or on ranks of its own; it always runs the actor's weights."""

    ranks: Any = "all"  # as above; where it shares ranks with other roles it needs all the ranks that those share
    tp: int = 1
    dtype: Dtype | None = None
    expert_parallel: bool = False
    # which ranks form an engine: those of a node that receive least when the weights come, or neighbours
    grouping: Literal["best", "contiguous"] = "best"
    gpu_memory_utilization: float = 0.6  # share of a GPU's memory that vLLM may use while it generates
    # give that memory to training between rollouts. false saves the time of sleeping and waking where both fit side by side;
    # on ranks of its own the engine never sleeps
    sleep: bool = True
    engine_args: dict[str, Any] = free()  # arguments of vLLM's LLM


@dataclass
class RolesConfig:
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reference: ReferenceConfig | None = None  # the frozen starting model, for algorithm.kl_coefficient > 0
    critic: CriticConfig | None = None  # for ppo and safe_rlhf, which without this section have one in the actor's layout
    cost_critic: CriticConfig | None = None  # for safe_rlhf, which without this section has one like the critic
    reward: RewardModelConfig | None = None  # for reward.kind=model or reward.model_weight
    cost: RewardModelConfig | None = None  # for cost.kind=model or cost.model_weight


@dataclass
class AlgorithmConfig:
    name: str = "grpo"  # grpo, ppo, remax, safe_rlhf, or a class of your own (algorithms/loop.py): package.module:Class
    epochs: int = 1  # passes over the samples of a step
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0  # of the penalty for moving away from the reference; with kl_target where it starts
    kl_in: Literal["loss", "reward"] = "loss"  # in the reward: ppo penalises token by token, grpo and remax the whole response
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    # nats of a response that the coefficient is adapted to hold (Ziegler et al. 2019), by a factor of at most 1 + 0.2 x kl_gain
    # or 1 - 0.2 x kl_gain a step; 0: the coefficient stays
    kl_target: float = 0.0
    kl_gain: float = 0.1
    # grpo: divide a group's advantages by the standard deviation of its rewards; ppo: to mean 0 and deviation 1 in every step
    normalize_advantages: bool = True
    gamma: float = 1.0  # ppo: discount per token
    gae_lambda: float = 0.95  # ppo: 1: rewards to come less values, 0: the next token's value only
    value_clip: float = 0.2  # ppo: how far a value may usefully move in a step; 0: any distance
    cost_limit: float = 0.0  # safe_rlhf: the mean cost that the policy must stay under
    lambda_init: float = 1.0  # safe_rlhf: the multiplier of the cost at the start
    lambda_lr: float = 0.1  # safe_rlhf: how fast the multiplier's logarithm follows the mean cost's distance to the limit
    lambda_max: float = 10.0  # safe_rlhf: the multiplier goes no higher, however far the limit is
    loss_level: Literal["token", "sequence"] = "token"  # of the policy's loss; the critic's is always by token
    old_log_probs: Literal["auto", "recompute", "rollout"] = "auto"  # see Config.old_log_probs


@dataclass
class BatchConfig:
    prompts: int = 32  # per step
    samples_per_prompt: int = 8
    mini_batches: int = 1  # optimizer steps per pass


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    max_prompt_tokens: int = 128  # longer prompts are dropped and counted
    max_response_tokens: int = 64


@dataclass
class DataConfig:
    source: Literal["reasoning_gym", "file"] = "reasoning_gym"
    task: str = ""  # source reasoning_gym: the task's name
    options: dict[str, Any] = free()  # source reasoning_gym: the task's own options
    path: str = ""  # source file: a .parquet or .jsonl file
    prompt_key: str = "prompt"  # the column with a prompt string or a list of chat messages
    answer_key: str = "answer"
    system_prompt: str = ""
    prompt_template: str = "{question}"
    response_template: str = "{answer}"  # the response that a warm start teaches
    seed: int = 0


@dataclass
class RewardConfig:
    """Where rewards come from; the section `cost` has the same keys."""

    # task: the task's own scorer; model: the model of roles.reward (roles.cost); http: a server of yours
    kind: Literal["task", "last_integer", "function", "model", "http"] = "task"
    function: str = ""  # kind function: path/to/file.py:name
    # kind http: gets {"prompt", "response", "answer", "metadata"} as JSON by POST, answers with a number or {"reward": number};
    # up before the job is
    url: str = ""
    model_weight: float = 0.0  # beside another kind: this times the score of roles.reward (roles.cost) is added
    concurrency: int = 8  # processes (kinds task and function) or requests at a time (http)
    timeout: float = 10.0  # seconds for one response; kind http: for one attempt
    retries: int = 3  # kind http: further attempts after a lost connection, a timeout, a status of 429 or of 500 and more
    cache_size: int = 0  # scores kept by prompt, response and answer, the longest unused go first; 0: none


@dataclass
class WarmStartConfig:
    """Supervised steps on the task's own answers before the first step of the algorithm."""

    steps: int = 0
    batch_size: int = 64  # sequences per step
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))
    correct_fraction: float = 1.0  # the rest are taught with a wrong answer


@dataclass
class EvaluationConfig:
    """Greedy accuracy on fixed problems that never occur in training, before and after."""

    problems: int = 64  # 0: no evaluation
    every: int = 0  # also after every so many steps; 0: only before and after


@dataclass
class ReshardingConfig:
    bucket_mb: int = 256  # packed messages between two ranks hold at most so many MiB
    verify_every: int = 0  # bit-exact comparison every so many steps; 0: at the first step only


@dataclass
class RunConfig:
    dir: str = MISSING
    steps: int = 100
    seed: int = 1
    save_every: int = 0  # checkpoint every so many steps, and after the last; 0: only the trained model at the end
    keep_checkpoints: int = 2  # the newest so many; 0: all
    keep_best: bool = True  # and the best: by the accuracy where evaluation.every is set, else by the step's mean reward
    # auto: go on from the newest whole checkpoint in `dir`, where there is one; never; or the folder of a checkpoint or a run
    resume: str = "auto"
    overwrite: bool = False  # delete the run that `dir` holds
    profile: bool = False  # write every rank's calls as timeline/step-N.json, which opens in Perfetto
    save_rollouts: bool = False  # keep every step's responses with their log-probs in rollouts/step-N.safetensors
    # the folder of an earlier run with save_rollouts: its responses are taken, step by step, in place of generating, so that
    # layouts or settings are compared on the same samples. Weights are still resharded, evaluations still generated
    replay: str = ""
    # wandb, mlflow: where metrics go besides metrics.jsonl and tensorboard/ (metrics/trackers.py); their settings and keys come
    # from their own environment variables
    trackers: list[str] = field(default_factory=list)
    project: str = ""  # of wandb, experiment of MLflow; empty: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, or hybridflow
    name: str = ""  # of the run there; empty: that of its folder
    port: int = 0  # where the ranks meet; 0: a free port, on several nodes MASTER_PORT of the environment
    # without a new phase, in the start without a new piece of it on any rank (a role to make, a file of weights to read), after
    # which every rank's stack is kept and the job ended; 0: never
    hang_minutes: float = 30.0
    max_skipped: int = 5  # updates of a role in a row that are skipped for a NaN, after which the run ends; 0: it goes on


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    cost: RewardConfig | None = None  # for safe_rlhf; without it, and with roles.cost, that model's scores
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.ranks_per_node

    @property
    def old_log_probs(self) -> Literal["own", "recompute", "rollout"]:
        """Whose log-probs stand for the policy that sampled.

        `recompute`: a forward pass of the actor before the step's first update; `rollout`: the engine's; `own`: those of the
        update itself, which are the same policy's while a step has a single update.
        """
        if self.algorithm.old_log_probs != "auto":
            return self.algorithm.old_log_probs
        return "recompute" if self.batch.mini_batches * self.algorithm.epochs > 1 else "own"

    def megatron_roles(self) -> dict[str, MegatronRoleConfig]:
        """The configured roles that live in Megatron-core, by name."""
        names = ("actor", "critic", "cost_critic", "reference", "reward", "cost")
        roles = {name: getattr(self.roles, name) for name in names}
        return {name: role for name, role in roles.items() if role is not None and getattr(role, "backend", "megatron") != "hf"}

    def scoring_roles(self) -> dict[str, RewardModelConfig]:
        """The configured reward and cost models, in Megatron-core or not."""
        roles = {"reward": self.roles.reward, "cost": self.roles.cost}
        return {name: role for name, role in roles.items() if role is not None}

    def scores(self) -> dict[str, RewardConfig]:
        """What every response is given: a reward, and a cost where there is one."""
        return {"reward": self.reward} | ({} if self.cost is None else {"cost": self.cost})

    def trained_roles(self) -> dict[str, TrainedConfig]:
        """Those of them that have an optimizer."""
        return {name: role for name, role in self.megatron_roles().items() if isinstance(role, TrainedConfig)}

    def ranks(self, role: str) -> Ranks:
        """The global ranks of a role; ValueError where `roles.X.ranks` can't be had."""
        wanted = getattr(self.roles, role).ranks
        return parse_ranks(f"roles.{role}.ranks", wanted, self.cluster.nodes, self.cluster.ranks_per_node)

    @property
    def rollout_shares(self) -> bool:
        """Whether the rollout engine has GPUs in common with another role, and so gives memory to it between rollouts."""
        others = {rank for role in self.megatron_roles() for rank in self.ranks(role)}
        return not others.isdisjoint(self.ranks("rollout"))

    def read_model(self, role: str) -> HFConfig:
        """The `config.json` of a role's model."""
        return HFConfig.from_folder(self.model_path(role), head=_HEADS.get(role, "lm"))

    def layout(self, role: str) -> Layout:
        """The layout of a role over its ranks; the rollout's ranks beyond an engine's tp count as dp."""
        count = len(self.ranks(role))
        if role == "rollout":
            return Layout(count, self.roles.rollout.tp)
        r = getattr(self.roles, role)
        sequence_parallel = r.sequence_parallel and r.tp > 1
        split = Split(tuple(r.split.stages), r.split.embedding, r.split.loss)
        if r.split.by_cost:
            hf = self.read_model(role)
            split = replace(split, loss=round(hf.output_weights / hf.layer_weights))
        return Layout(count, r.tp, r.pp, r.vpp, r.cp, r.ep, r.etp, sequence_parallel, split)

    def model_path(self, role: str) -> str:
        override = getattr(self.roles, "actor" if role == "rollout" else role).model
        return (override and override.path) or self.model.path

    def dtype(self, role: str) -> str:
        """`float32` or `bfloat16`; the rollout's is its own, else the actor's."""
        if role == "rollout":
            return self.roles.rollout.dtype or self.dtype("actor")
        own = getattr(self.roles, role)
        return own.dtype or (own.model and own.model.dtype) or self.model.dtype
