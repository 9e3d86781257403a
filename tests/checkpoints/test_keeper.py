"""The driver's part of checkpoints, with roles that only write a file: when, what, what is kept, and what comes back."""

import dataclasses
import errno
import json
from pathlib import Path

import pytest

from hybridflow.algorithms.run import Run
from hybridflow.checkpoints.keeper import CheckpointKeeper
from hybridflow.checkpoints.resume import Start, find_start
from hybridflow.config.load import load
from hybridflow.config.preflight import check
from hybridflow.config.schema import Config, ConfigError
from hybridflow.metrics.recorder import Recorder
from tests.algorithms.fakes import Answered, FakeText
from tests.config.folders import write_config, write_model

PPO = ["algorithm={name: ppo, kl_coefficient: 0.1, kl_target: 0.5}", "run.steps=6", "run.save_every=2"]


class WritingRole:
    """`save` writes a file, which is on disk after `slow` further questions."""

    def __init__(self, name: str, slow: int = 0):
        self.name, self.slow, self.loaded, self.trained, self.saves = name, slow, [], [], 0
        self._asked = 0

    def save(self, folder: str) -> Answered:
        Path(folder).mkdir()
        (Path(folder) / "__0_0.distcp").write_bytes(self.name.encode() * 50)
        self.saves, self._asked = self.saves + 1, 0
        return Answered([None])

    def saved(self, wait: bool) -> Answered:
        self._asked += 1
        return Answered([wait or self._asked > self.slow])

    def load(self, folder: str) -> Answered:
        self.loaded.append(folder)
        return Answered([None])

    def start_training(self, settings) -> Answered:
        self.trained.append(settings)
        return Answered([None])


class Source:
    dropped = 0
    evaluation = ()


class Multiplier:
    """An algorithm with a state of its own."""

    def __init__(self, value: float = 0.0):
        self.value = value

    def state(self) -> dict:
        return {"multiplier": self.value}

    def load_state(self, state: dict) -> None:
        self.value = state["multiplier"]


@pytest.fixture
def config(tmp_path) -> Path:
    return write_config(tmp_path, write_model(tmp_path / "model"))


def make_run(config: Config, slow: int = 0) -> Run:
    roles = {name: WritingRole(name, slow) for name in ("actor", "critic", "reference", "rollout", "worker")}
    roles["worker"].courier = None
    recorder = Recorder(config.run.dir, config, restarts=find_start(config).restarts)
    return Run(config, roles, FakeText(), Source(), [], recorder)


def take_steps(run: Run, keeper: CheckpointKeeper, rewards: dict[int, float]) -> None:
    for step, reward in rewards.items():
        run.step_index, run.position = step, 10 * step
        run.kl.value = 0.1 + step
        run.recorder.samples([{"step": step}])
        run.recorder.log({"step": step, "reward/mean": reward})
        keeper.after_step()


def test_a_run_goes_on_where_its_newest_whole_checkpoint_was(tmp_path, config, capsys):
    first = make_run(load(config, PPO))
    keeper = CheckpointKeeper(first, Multiplier(7.5), Start())
    assert not keeper.restore()
    take_steps(first, keeper, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5})
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-4"]
    assert f"saved {checkpoints}/step-4 (" in capsys.readouterr().out
    # the reference never changes: one file for both
    files = [checkpoints / f"step-{step}" / "reference" / "__0_0.distcp" for step in (2, 4)]
    assert files[0].samefile(files[1]) and first.reference.saves == 1 and first.actor.saves == 2
    (checkpoints / ".step-6.partial").mkdir()

    again = load(config, PPO)
    check(again)  # a folder that holds a run is no obstacle
    start = find_start(again)
    assert start.lines[0] == f"skipped: {checkpoints}/.step-6.partial was not written to its end"
    assert start.lines[1] == f"resumes after step 4 from {checkpoints}/step-4" and start.own
    second, multiplier = make_run(again), Multiplier()
    assert CheckpointKeeper(second, multiplier, start).restore()
    assert (second.step_index, second.position, second.kl.value, multiplier.value) == (4, 40, 4.1, 7.5)
    for role in second.saved_roles():
        assert role.loaded == [str(checkpoints / "step-4" / role.name)]
    assert second.actor.trained[0].lr == 1e-6 and second.critic.trained[0].lr == 1e-5 and not second.reference.trained
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / "run" / name).read_text().splitlines()] == [1, 2, 3, 4]
    assert [row["step"] for row in second.recorder.history.steps] == [1, 2, 3, 4]
    assert not (checkpoints / ".step-6.partial").exists()


def test_a_save_is_done_when_it_is_on_disk(tmp_path, config, capsys):
    run = make_run(load(config, [*PPO, "run.save_every=3"]), slow=2)
    keeper = CheckpointKeeper(run, Multiplier(), Start())
    checkpoints = tmp_path / "run" / "checkpoints"
    take_steps(run, keeper, {1: 0.1, 2: 0.2, 3: 0.3})
    assert [path.name for path in checkpoints.iterdir()] == [".step-3.partial"]  # being written
    assert "saved" not in capsys.readouterr().out
    take_steps(run, keeper, {4: 0.4, 5: 0.5})
    assert [path.name for path in checkpoints.iterdir()] == ["step-3"]
    assert "saved" in capsys.readouterr().out
    take_steps(run, keeper, {6: 0.1})
    keeper.finish(wait=True)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-3", "step-6"]


def test_a_full_disk_leaves_the_last_good_one(tmp_path, config, monkeypatch):
    run = make_run(load(config, PPO))
    keeper = CheckpointKeeper(run, Multiplier(), Start())
    take_steps(run, keeper, {1: 0.1, 2: 0.2, 3: 0.3})

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hybridflow.checkpoints.keeper.save_config", full)
    checkpoints = tmp_path / "run" / "checkpoints"
    with pytest.raises(OSError, match="No space left on device: .*the last whole checkpoint is .*step-2: .*step-4.partial"):
        take_steps(run, keeper, {4: 0.4})
    assert [path.name for path in checkpoints.iterdir()] == ["step-2"]


CHANGES = [
    (
        ["algorithm.name=grpo", "roles.critic=null"],
        "these roles: it has a critic, this configuration has none: set roles.critic",
    ),
    (["algorithm.kl_coefficient=0", "algorithm.kl_target=0"], "has a reference, this configuration has none"),
    (["algorithm.kl_target=0.7"], "algorithm.kl_target=0.7, it was 0.5: the KL coefficient was adapted to it"),
    (["model.dtype=bfloat16"], "the actor's dtype=bfloat16, it was float32"),
    (["data.seed=3"], "data.seed=3, it was 0: the position in the data would mean nothing"),
    (["evaluation.problems=8"], "evaluation.problems=8, it was 64"),
]


@pytest.fixture
def saved(tmp_path, config) -> Path:
    run = make_run(load(config, PPO))
    take_steps(run, CheckpointKeeper(run, Multiplier(), Start()), {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    return config


def test_changes_that_would_make_the_state_wrong_are_refused(tmp_path, saved):
    for overrides, message in CHANGES:
        with pytest.raises(ConfigError) as caught:
            find_start(load(saved, [*PPO, *overrides]))
        assert message in str(caught.value)
    other = write_model(tmp_path / "other", hidden_size=32)
    with pytest.raises(
        ConfigError, match=r"the actor's model.path=.*/other, it was .*/model: their config.json or tokenizer.json"
    ):
        find_start(load(saved, [*PPO, f"model.path={other}"]))


def test_layouts_and_the_like_may_differ(tmp_path, saved):
    (tmp_path / "model").rename(tmp_path / "moved")  # the same model elsewhere
    changes = ["roles.actor.tp=1", "roles.actor.optimizer.lr=0.5", "run.steps=50", f"model.path={tmp_path / 'moved'}"]
    start = find_start(load(saved, [*PPO, *changes]))
    assert start.checkpoint.step == 4
    assert "roles.actor.tp 2 -> 1" in start.lines[-1] and "roles.actor.optimizer.lr 1e-06 -> 0.5" in start.lines[-1]


def test_where_a_run_starts(tmp_path, saved):
    assert find_start(load(saved, [*PPO, "run.resume=never"])) == Start()
    assert find_start(load(saved, [*PPO, "run.overwrite=true"])) == Start()
    old = find_start(load(saved, [*PPO, f"run.resume={tmp_path}/run/checkpoints/step-2"]))
    assert old.own and old.checkpoint.step == 2
    for path in ("run", "run/checkpoints"):
        new = find_start(load(saved, [*PPO, f"run.resume={tmp_path}/{path}", f"run.dir={tmp_path}/new"]))
        assert not new.own and new.checkpoint.step == 4
    with pytest.raises(ConfigError, match="which run.overwrite=true would delete"):
        find_start(load(saved, [*PPO, f"run.resume={tmp_path}/run", "run.overwrite=true"]))
    with pytest.raises(ConfigError, match="run.overwrite"):
        check(load(saved, [*PPO, "run.resume=never"]))


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path, config):
    before = load(config, PPO)
    run = make_run(before)
    take_steps(run, CheckpointKeeper(run, Multiplier(), Start()), {1: 0.1})
    start = find_start(before)
    assert start.restarts and "starts again from the beginning" in start.lines[0]
    check(before)
    make_run(before)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    unsaved = dataclasses.replace(before, run=dataclasses.replace(before.run, save_every=0, dir=str(tmp_path / "unsaved")))
    make_run(unsaved)
    with pytest.raises(ConfigError, match="holds a run already"):  # its results would be lost
        check(unsaved)


def edit(checkpoint: Path, name: str, text: str) -> None:
    """Change a file of a checkpoint and what its marker says of it."""
    (checkpoint / name).write_text(text)
    about = json.loads((checkpoint / "complete.json").read_text())
    about["files"][name] = len(text)
    (checkpoint / "complete.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "{", "run.json is not valid JSON"),
        ("run.json", "{}", "run.json lacks run and records: it is damaged, use another checkpoint"),
        ("models.yaml", "", "models.yaml lacks path, model or dtype of the actor: it is damaged, use another"),
        ("models.yaml", "actor: 5", "models.yaml lacks path, model or dtype of the actor"),
        ("config.yaml", "{", "config.yaml of an earlier run cannot be read (while parsing"),
        ("config.yaml", "- a", "config.yaml of an earlier run holds no sections"),
        ("config.yaml", "5", "config.yaml of an earlier run cannot be read"),
    ],
)
def test_damage_is_seen_before_the_start(tmp_path, saved, name, text, message):
    edit(tmp_path / "run" / "checkpoints" / "step-4", name, text)
    with pytest.raises(ConfigError) as caught:
        find_start(load(saved, PPO))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_whose_checkpoints_are_damaged_is_not_thrown_away(tmp_path, saved):
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        (checkpoint / "actor" / "__0_0.distcp").write_bytes(b"")
    start = find_start(load(saved, PPO))
    assert not start.restarts and start.checkpoint is None
    with pytest.raises(ConfigError, match=r"holds a run, and no whole checkpoint to go on from: .*distcp has 0 bytes, not"):
        check(load(saved, PPO))


def test_a_file_is_no_checkpoint(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.resume=.*file is no whole checkpoint"):
        find_start(load(config, [f"run.resume={tmp_path}/file"]))
