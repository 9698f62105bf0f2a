"""Adapters that PEFT loads after `replace_with_kernel_inject`: they take effect, or are refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.inference.executors.native import FusedExecutor
from tests.unit.inference.test_adapters import adapted, llama

peft = pytest.importorskip("peft")
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def tokens(model: Any) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=96, pad_token_id=0)[0].tolist()


@pytest.mark.parametrize("way", ["load_adapter", "PeftModel"])
def test_an_adapter_loaded_after_injection_takes_effect(way: str, tmp_path: Path) -> None:
    base = llama()
    merged = adapted(base, tmp_path, r=4, target_modules="all-linear")
    right, plain = tokens(merged), tokens(copy.deepcopy(base))
    assert right != plain
    engine = deepspeed.init_inference(base, dtype=torch.float32, replace_with_kernel_inject=True)
    assert isinstance(engine._injected._generator._executor, FusedExecutor)
    assert tokens(engine) == plain
    if way == "PeftModel":
        wrapped = peft.PeftModel.from_pretrained(engine.module, tmp_path).eval()
        assert tokens(engine) == tokens(wrapped) == right
        with wrapped.disable_adapter():
            assert tokens(engine) == plain
        wrapped.merge_adapter()
        assert tokens(engine) == right
        wrapped.unmerge_adapter()
        assert wrapped.unload() is engine.module
        assert tokens(engine) == plain
    else:
        engine.module.load_adapter(str(tmp_path))
        assert tokens(engine) == right


def test_packed_matrices_refuse_them_by_name(tmp_path: Path) -> None:
    base = llama(hidden_size=128, intermediate_size=128).to(torch.bfloat16)
    adapted(base, tmp_path, r=4, target_modules=["q_proj"])
    engine = deepspeed.init_inference(
        base, dtype=torch.bfloat16, replace_with_kernel_inject=True, lossless_weights=True
    )
    with pytest.raises(ValueError, match="is not supported"):
        peft.PeftModel.from_pretrained(engine.module, tmp_path)
