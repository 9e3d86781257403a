"""Loading: defaults, overrides, and one clear line for whatever does not belong into a configuration."""

import re

import pytest

from hybridflow.config.load import load, save
from hybridflow.config.schema import ConfigError
from megatron_ext.layout import Split


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m, dtype: float32}\nroles: {actor: {tp: 2, pp: 2}}\nrun: {dir: r}\n")
    return file


def test_defaults_and_overrides(path):
    config = load(
        path, ["roles.actor.optimizer.lr=2e-5", "cluster.ranks_per_node=8", "data.options.max_terms=2", "run.steps=7"]
    )
    assert config.roles.actor.optimizer.lr == 2e-5 and isinstance(config.roles.actor.optimizer.lr, float)
    assert config.data.options == {"max_terms": 2}
    assert (config.run.steps, config.world_size, config.layout("actor").dp) == (7, 8, 2)
    assert (config.layout("rollout").tp, config.layout("rollout").dp) == (1, 8)
    assert config.roles.reference is None
    assert config.sampling.temperature == 1.0


def test_free_sections_keep_anything(path):
    config = load(path, ["roles.actor.megatron={a: {b: [1, x]}}", "roles.rollout.engine_args.enforce_eager=true"])
    assert config.roles.actor.megatron == {"a": {"b": [1, "x"]}}
    assert config.roles.rollout.engine_args == {"enforce_eager": True}


def test_a_role_may_have_its_own_model_and_dtype(path):
    config = load(path, ["roles.reference={model: {path: other}}", "roles.rollout.dtype=bfloat16"])
    assert [config.model_path(role) for role in ("actor", "rollout", "reference")] == ["m", "m", "other"]
    assert [config.dtype(role) for role in ("actor", "rollout", "reference")] == ["float32", "bfloat16", "float32"]


def test_a_split_of_layers(path):
    config = load(path, ["roles.actor.split.stages=[3,1]", "roles.reference={pp: 4, split: {loss: 1}}"])
    assert config.layout("actor").stage_layers(4) == [[[0, 1, 2]], [[3]]]
    assert config.layout("reference").split == Split(loss=1)


def test_kl_brings_a_reference_in_the_actors_layout(path):
    config = load(path, ["algorithm.kl_coefficient=0.1", "roles.actor.megatron.x=1", "roles.actor.split.loss=1"])
    assert config.roles.reference is not None
    assert config.layout("reference") == config.layout("actor")
    assert config.roles.reference.megatron == {"x": 1}
    assert config.roles.reference.megatron is not config.roles.actor.megatron


def test_ppo_brings_a_critic_in_the_actors_layout(path):
    actor = ["roles.actor.micro_batch_tokens=99", "roles.actor.offload=[grads]", "roles.actor.optimizer.lr=1e-3"]
    config = load(path, ["algorithm.name=ppo", *actor])
    critic = config.roles.critic
    assert config.layout("critic") == config.layout("actor")
    assert (critic.micro_batch_tokens, critic.offload, critic.optimizer.lr) == (99, ["grads"], 1e-5)
    assert list(config.megatron_roles()) == list(config.trained_roles()) == ["actor", "critic"]
    assert load(path, actor).roles.critic is None


def test_a_critic_of_its_own(path):
    keys = "{pp: 4, dtype: bfloat16, model: {path: other}, optimizer: {lr: 0.1}, micro_batch_tokens: 7}"
    config = load(path, ["algorithm.name=ppo", "cluster.ranks_per_node=8", f"roles.critic={keys}"])
    assert (config.layout("critic").pp, config.layout("critic").dp) == (4, 2)
    assert (config.dtype("critic"), config.model_path("critic"), config.model_path("actor")) == ("bfloat16", "other", "m")
    assert (config.roles.critic.optimizer.lr, config.roles.critic.micro_batch_tokens) == (0.1, 7)


@pytest.mark.parametrize(
    "overrides,expected",
    [
        ([], "own"),
        (["batch.mini_batches=2"], "recompute"),
        (["algorithm.epochs=2"], "recompute"),
        (["batch.mini_batches=2", "algorithm.old_log_probs=rollout"], "rollout"),
        (["algorithm.old_log_probs=recompute"], "recompute"),
    ],
)
def test_whose_log_probs_are_the_old_ones(path, overrides, expected):
    assert load(path, overrides).old_log_probs == expected


def test_save_and_load_again(path, tmp_path):
    config = load(
        path, ["algorithm.name=ppo", "data.options={a: [1, 2]}", "algorithm.kl_coefficient=0.5", "data.system_prompt='a: b'"]
    )
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    "override,message",
    [
        ("roles.actor.tp=two", "roles.actor.tp='two' is not an integer"),
        ("roles.actor.tp=2.5", "roles.actor.tp=2.5 is not an integer"),
        ("run.steps=true", "run.steps=True is not an integer"),
        ("roles.actor.optimizer.lr=high", "roles.actor.optimizer.lr='high' is not a number"),
        ("roles.actor.optimizer.betas=0.9", "roles.actor.optimizer.betas=0.9 is not a list of numbers"),
        ("roles.actor.optimizer.betas=[0.9,x]", "roles.actor.optimizer.betas[1]='x' is not a number"),
        ("run.overwrite=maybe", "run.overwrite='maybe' is not true or false"),
        ("run.dir=null", "run.dir=null is not a string"),
        ("cluster.device=gpu", "cluster.device='gpu' is not one of auto, cuda, cpu"),
        ("roles.actor.dtype=half", "roles.actor.dtype='half' is not one of float32, bfloat16 or null"),
        ("data.options=3", "data.options=3 is not a section of key: value"),
        ("batch=3", "batch=3 is not a section: write its keys, such as batch.prompts"),
        ("roles.actor=null", "roles.actor=null is not a section of key: value"),
        ("roles.actr.tp=1", "unknown key roles.actr: did you mean roles.actor?"),
        ("roles.actor.optimizer.lrr=1", "unknown key roles.actor.optimizer.lrr: did you mean roles.actor.optimizer.lr?"),
        ("lr=1", "unknown key lr: did you mean roles.actor.optimizer.lr?"),
        ("batch.xyz=1", "unknown key batch.xyz: batch has prompts, samples_per_prompt, mini_batches"),
        (
            "roles.reference={release_weights: always}",
            "unknown key roles.reference.release_weights: it has no optimizer to rebuild weights from:"
            " use roles.reference.offload=[params]",
        ),
        ("roles.critic.tpp=1", "unknown key roles.critic.tpp: did you mean roles.critic.tp?"),
        ("roles.cost.tpp=1", "unknown key roles.cost.tpp: did you mean roles.cost.tp?"),
        ("run.steps=${batch.nope}", "run.steps: Interpolation key 'batch.nope' not found"),
        (
            "algorithm=${batch}",
            "a section that refers to another by ${...} is of another kind (Invalid type assigned: BatchConfig is not a"
            " subclass of AlgorithmConfig): write out its keys",
        ),
        ("run.steps=!!int x", "override 'run.steps=!!int x' cannot be read: invalid literal for int() with base 10: 'x'"),
        ("steps", "override 'steps' is not of the form key=value, such as run.steps=10"),
    ],
)
def test_refuses(path, override, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load(path, [override])


@pytest.mark.parametrize(
    "text,message",
    [
        ("model: [", "is not valid YAML"),
        ("- a", "holds a ListConfig"),
        ("run: {steps: 3}", "model.path is not set"),
        ("run: {dir: r, dir: s}", "is not valid YAML"),
        ("\trun: {dir: r}", "is not valid YAML"),
        ("5", "cannot be read (Invalid loaded object type: int): write sections of key: value"),
        ("run: " + "{a: " * 400 + "1" + "}" * 400, "is not valid YAML: "),
    ],
)
def test_refuses_files(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        load(tmp_path / "c.yaml")
    assert "\n" not in str(refused.value)


def test_refuses_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml does not exist$"):
        load(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="is not a file$"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("roles.actor.offload={params: true}", "roles.actor.offload={'params': True} is not a list of strings"),
        ("roles.actor.optimizer.betas={a: 1}", "is not a list of numbers"),
        ("roles.rollout.engine_args=[1]", "roles.rollout.engine_args"),
        ("roles.rollout.sleep=3", "roles.rollout.sleep=3 is not true or false"),
        ("roles.rollout.expert_parallel=2", "roles.rollout.expert_parallel=2 is not true or false"),
    ],
)
def test_values_of_another_kind_are_one_line(override, message):
    with pytest.raises(ConfigError) as caught:
        load("configs/quickstart.yaml", [override])
    assert message in str(caught.value) and "\n" not in str(caught.value)
