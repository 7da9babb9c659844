"""Tiny language models of the transformers library, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

#: Selects the same arithmetic on both sides, so that logits can be compared bit for bit.
EAGER = {"attn_implementation": "eager"}


@contextmanager
def transformers_offline() -> Iterator[ModuleType]:
    """Yield the transformers library without network access and progress bars. The import takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # the import reads this variable
        library: Any = pytest.importorskip("transformers")
        library.utils.logging.disable_progress_bar()
        yield library
        library.utils.logging.enable_progress_bar()


def tiny_model(transformers: ModuleType, kind: str) -> Any:
    """Return the model `kind`: "gpt2" with tied embeddings, or "llama" without."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    else:
        config = transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            tie_word_embeddings=False,
        )
    return transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
