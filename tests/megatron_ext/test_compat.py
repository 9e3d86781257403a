"""Version range, keyword filtering, and the patched RoPE against each sequence alone."""

from dataclasses import dataclass
from types import SimpleNamespace

import megatron.core
import pytest
import torch

from megatron_ext import compat


@dataclass
class Fields:
    a: int = 0


def test_accepted():
    assert compat.accepted(Fields, {"a": 1, "b": 2}) == {"a": 1}
    assert compat.accepted(lambda b: b, {"a": 1, "b": 2}) == {"b": 2}


def test_versions(monkeypatch: pytest.MonkeyPatch):
    assert str(compat.check_version()) == megatron.core.__version__
    for version in ("0.15.3", "0.20.0"):
        monkeypatch.setattr(megatron.core, "__version__", version)
        with pytest.raises(RuntimeError, match=f"megatron-core {version} is not supported: install megatron-core>=0.16,<0.20"):
            compat.check_version()


def test_packed_rope_equals_each_sequence_alone():
    from megatron.core.models.common.embeddings import rope_utils

    compat.patch()
    ends = torch.tensor([0, 5, 6, 20], dtype=torch.int32)
    x, frequencies = torch.randn(20, 3, 8), torch.randn(14, 1, 1, 8)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    found = rope_utils._apply_rotary_pos_emb_thd(x, ends, frequencies, cp_group=alone)
    for start, end in ((0, 5), (5, 6), (6, 20)):
        expected = rope_utils._apply_rotary_pos_emb_bshd(x[start:end, None], frequencies[: end - start]).squeeze(1)
        torch.testing.assert_close(found[start:end], expected)
