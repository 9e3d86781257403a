"""Errors of writing name the file."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.writing import writing
from tests.full_disk import no_file_grows_beyond


def test_a_full_disk_names_the_file():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'") as caught, writing(Path("/dev/full")):
        Path("/dev/full").write_text("text")
    assert caught.value.errno == errno.ENOSPC


def test_so_does_a_file_of_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    with (
        pytest.raises(OSError, match=rf"{path} could not be written: .*File too large"),
        no_file_grows_beyond(1000),
        writing(path),
    ):
        save_file({"a": torch.zeros(10_000)}, path)


def test_a_name_that_is_known_stays(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing/file"), writing(tmp_path):
        (tmp_path / "missing" / "file").write_text("")
