"""Rank files of runs with three and eight processes. The merged model equals the full state dict and loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_runs import MODELS, assert_merged, assert_merged_optimizer, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch


@pytest.mark.parametrize("ranks", [3, 8])
def test_runs(ranks: int, tmp_path: Path) -> None:
    """Rank files of every kind of run are merged, over one and two mesh dimensions, with uneven and empty parts.
    Optimizers are merged too.
    """
    runs = run_ranks(tmp_path, ranks)
    for name in MODELS:
        assert_merged(runs / name, tmp_path / f"{name}.pt")
        if (runs / f"{name}.optim.whole.pt").exists():
            assert_merged_optimizer(runs / name, ranks, tmp_path / f"{name}.optim.pt")
