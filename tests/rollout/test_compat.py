"""Patches of vLLM whose effect can be seen without an engine."""

import os

import pytest

from hybridflow.rollout import vllm_compat


@pytest.mark.parametrize("before", [None, "/some/lib.so"])
def test_vllm_leaves_no_preloads_behind(monkeypatch, before):
    """From a path with a space every process that started later printed an error of the loader."""
    if before is None:
        monkeypatch.delenv("LD_PRELOAD", raising=False)
    else:
        monkeypatch.setenv("LD_PRELOAD", before)
    seen = []

    def original(config: object) -> None:
        seen.append(config)
        os.environ["LD_PRELOAD"] = "/a path/libgomp.so"

    vllm_compat._without_preloads(type(None), "config", original=original)
    assert seen == ["config"]
    assert os.environ.get("LD_PRELOAD") == before
