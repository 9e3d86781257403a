"""Folders of checkpoints: half-written ones are seen, the last good and the best are kept."""

import json

import pytest

from hybridflow.checkpoints import folder as folders
from hybridflow.checkpoints.folder import BrokenCheckpoint


def write(checkpoints, step: int, score: float | None = None, score_of: str = "reward/mean"):
    partial = folders.partial_folder(checkpoints, step)
    (partial / "actor").mkdir(parents=True)
    (partial / "actor" / "__0_0.distcp").write_bytes(b"x" * 100)
    (partial / "run.json").write_text("{}")
    return folders.complete(partial, folders.whole_folder(checkpoints, step), step, ["actor"], score, score_of)


def names(checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_a_whole_one(tmp_path):
    written = write(tmp_path, 20, 0.5)
    assert names(tmp_path) == ["step-20"]
    assert (written.step, written.score, written.roles) == (20, 0.5, ("actor",))
    assert folders.find(tmp_path) == ([written], [])


def truncate(path):
    file = path / "actor" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:60])


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (truncate, "step-3: actor/__0_0.distcp has 60 bytes, not 100"),
        (lambda path: (path / "actor" / "__0_0.distcp").unlink(), "step-3: actor/__0_0.distcp is missing"),
        (lambda path: (path / "complete.json").unlink(), "step-3 has no complete.json: it was not written to its end"),
        (lambda path: (path / "complete.json").write_text('{"st'), "complete.json is not valid JSON"),
        (lambda path: (path / "complete.json").write_text("[]"), "complete.json says nothing of step: it is damaged"),
        (lambda path: (path / "complete.json").write_text('{"step": 3}'), "complete.json says nothing of roles"),
        (lambda path: path.rename(path.parent / ".step-3.partial"), ".step-3.partial was not written to its end"),
    ],
    ids=["truncated", "file-missing", "marker-missing", "marker-cut", "marker-list", "marker-lacks", "partial"],
)
def test_a_half_written_one_is_never_taken_for_whole(tmp_path, harm, what):
    write(tmp_path, 2)
    harm(write(tmp_path, 3).path)
    whole, broken = folders.find(tmp_path)
    assert [checkpoint.step for checkpoint in whole] == [2]
    assert len(broken) == 1 and what in broken[0]
    folders.remove_others(tmp_path, 2)
    assert names(tmp_path) == ["step-2"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, score in enumerate((0.1, 0.9, 0.3, 0.4, 0.5), start=1):
        write(tmp_path, step, score)
        folders.prune(tmp_path, keep=2, keep_best=True)
    assert names(tmp_path) == ["step-2", "step-4", "step-5"]
    folders.prune(tmp_path, keep=2, keep_best=False)
    assert names(tmp_path) == ["step-4", "step-5"]
    folders.prune(tmp_path, keep=0, keep_best=True)
    assert names(tmp_path) == ["step-4", "step-5"]


def test_scores_of_unlike_kinds_are_not_compared(tmp_path):
    write(tmp_path, 1, 0.9)
    write(tmp_path, 2, 0.2, "accuracy")
    write(tmp_path, 3, None, "accuracy")
    assert folders.best_of(folders.find(tmp_path)[0]).step == 2


def test_the_state_of_the_driver(tmp_path):
    checkpoint = write(tmp_path, 1)
    (checkpoint.path / "run.json").write_text(json.dumps({"run": {"step": 1}}))
    with pytest.raises(BrokenCheckpoint, match="run.json has"):
        folders.inspect(checkpoint.path)
    assert folders.read_state(checkpoint) == {"run": {"step": 1}}
