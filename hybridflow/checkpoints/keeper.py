"""The driver's part of checkpoints: asks the roles for theirs, adds what it knows itself, and says when one is on disk."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from hybridflow.checkpoints import folder as folders
from hybridflow.checkpoints.folder import Checkpoint, read_state
from hybridflow.checkpoints.resume import Start, model_print
from hybridflow.config.load import save as save_config
from hybridflow.controller.handle import RoleHandle
from hybridflow.controller.hang import progress
from megatron_ext.export import copy_about

if TYPE_CHECKING:
    from hybridflow.algorithms.loop import Algorithm
    from hybridflow.algorithms.run import Run


class CheckpointKeeper:
    """Saves every `run.save_every` steps. One save is under way at most: the next one waits for it."""

    def __init__(self, run: "Run", algorithm: "Algorithm", start: Start):
        self._run, self._algorithm, self._start = run, algorithm, start
        self._folder = Path(run.config.run.dir) / "checkpoints"
        self._pending: tuple[Path, int, float] | None = None  # folder, step, when it began
        self._linkable: Path | None = None  # a whole checkpoint whose reference is the present one

    def restore(self) -> bool:
        """Bring everything to where the checkpoint was, where there is one; whether there is."""
        checkpoint = self._start.checkpoint
        if checkpoint is None:
            return False
        run = self._run
        with run.recorder.phase("load"):
            state = read_state(checkpoint)
            run.load_state(state["run"])
            run.start_saved_training()
            for role in run.saved_roles():
                progress(f"the loading of the {role.name}'s checkpoint")
                role.load(str(checkpoint.path / role.name)).result()
            load_state = getattr(self._algorithm, "load_state", None)
            if load_state is not None:
                load_state(state["algorithm"])
        if self._start.own:
            run.recorder.go_on(state["records"], checkpoint.step)
            folders.remove_others(self._folder, checkpoint.step)
            self._linkable = checkpoint.path
        run.recorder.take_phases()
        return True

    def after_step(self) -> None:
        """Finish what has been written meanwhile, and save where it is due."""
        every, step = self._run.config.run.save_every, self._run.step_index
        due = every and (step % every == 0 or step == self._run.config.run.steps)
        self.finish(wait=bool(due))
        if due:
            self.save()
            self.finish(wait=False)

    def save_before_leaving(self) -> None:
        """The present step is on disk afterwards, whatever `run.save_every` says."""
        self.finish(wait=True)
        whole, _ = folders.find(self._folder)
        if not whole or whole[0].step != self._run.step_index:
            self.save()
            self.finish(wait=True)

    def save(self) -> None:
        """Begin a checkpoint of the present step."""
        run, partial = self._run, folders.partial_folder(self._folder, self._run.step_index)
        with run.recorder.phase("save"):
            started = time.monotonic()
            self._folder.mkdir(exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self._pending = partial, run.step_index, started
            try:
                self._write_own(partial)
                for role in run.saved_roles():
                    if not self._link_reference(role, partial):
                        role.save(str(partial / role.name)).result()
            except OSError as error:
                self._give_up(error)

    def finish(self, wait: bool) -> None:
        """The checkpoint under way becomes a whole one once all of it is on disk; with `wait` it is afterwards."""
        if self._pending is None:
            return
        run, (partial, step, started) = self._run, self._pending
        with run.recorder.phase("save"):
            done = [all(role.saved(wait).result()) for role in run.saved_roles()]
            if not all(done):
                return
            roles = [role.name for role in run.saved_roles()]
            try:
                whole = folders.complete(partial, folders.whole_folder(self._folder, step), step, roles, *self._score(step))
            except OSError as error:
                self._give_up(error)
            self._pending, self._linkable = None, whole.path
            settings = run.config.run
            folders.prune(self._folder, settings.keep_checkpoints, settings.keep_best)
        run.recorder.line(self._describe(whole, time.monotonic() - started))

    def _describe(self, whole: Checkpoint, seconds: float) -> str:
        size = sum(path.stat().st_size for path in whole.path.rglob("*") if path.is_file())
        best = folders.best_of(folders.find(self._folder)[0])
        note = f", the best so far by {whole.score_of}: {whole.score:.3f}" if best and best.path == whole.path else ""
        return f"saved {whole.path} ({size / 2**20:.1f} MiB in {seconds:.1f} s{note})"

    def _score(self, step: int) -> tuple[float | None, str]:
        """The accuracy of this step's evaluation where there are evaluations on the way, otherwise its mean reward."""
        history, config = self._run.recorder.history, self._run.config
        if config.evaluation.every and config.evaluation.problems:
            return next((e.accuracy for e in history.evaluations if e.step == step), None), "accuracy"
        return next((s.get("reward/mean") for s in history.steps if s["step"] == step), None), "reward/mean"

    def _write_own(self, partial: Path) -> None:
        run = self._run
        save_config(run.config, partial / "config.yaml")
        state = getattr(self._algorithm, "state", None)
        known: dict[str, Any] = {"run": run.state(), "algorithm": state() if state is not None else {}}
        known["records"] = run.recorder.position()
        (partial / "run.json").write_text(json.dumps(known, indent=2) + "\n")
        models = {}
        for role in run.saved_roles():
            path, hf = run.config.model_path(role.name), run.config.read_model(role.name)
            models[role.name] = {"path": path, "model": model_print(path), "dtype": run.config.dtype(role.name)}
            copy_about(Path(path), partial / "models" / role.name, hf, run.config.dtype(role.name))
        OmegaConf.save(OmegaConf.create(models), partial / "models.yaml")

    def _link_reference(self, role: RoleHandle, partial: Path) -> bool:
        """The reference never changes: its files are those of the checkpoint before, where the file system can share them."""
        if role.name != "reference" or self._linkable is None:
            return False
        try:
            shutil.copytree(self._linkable / role.name, partial / role.name, copy_function=os.link)
        except OSError:
            shutil.rmtree(partial / role.name, ignore_errors=True)
            return False
        return True

    def _give_up(self, error: OSError) -> None:
        """Say what could not be written and what is there instead, and leave nothing half-written behind."""
        partial, _, _ = self._pending
        shutil.rmtree(partial, ignore_errors=True)
        whole, _ = folders.find(self._folder)
        left = f"the last whole checkpoint is {whole[0].path}" if whole else "there is no whole checkpoint yet"
        raise OSError(error.errno, f"{error.strerror}: the checkpoint could not be written; {left}", str(partial)) from error
