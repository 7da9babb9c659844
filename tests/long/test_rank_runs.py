"""Rank files of runs of three and eight processes: the merged model is the full state dict, and loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_runs import MODELS, assert_merged, assert_merged_optimizer, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about itself


@pytest.mark.parametrize("ranks", [3, 8])
def test_runs(ranks: int, tmp_path: Path) -> None:
    """Of every kind of run, over one and two dimensions, with uneven and empty parts; the optimizer too."""
    runs = run_ranks(tmp_path, ranks)
    for name in MODELS:
        assert_merged(runs / name, tmp_path / f"{name}.pt")
        if (runs / f"{name}.optim.whole.pt").exists():
            assert_merged_optimizer(runs / name, ranks, tmp_path / f"{name}.optim.pt")
