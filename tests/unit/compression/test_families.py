"""Units read off the model's own config: removed is masked, the folder loads equal, what cannot be said is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.compression.export import export
from deepspeed.compression.families import Shrink
from deepspeed.compression.layers import block_lists, keep_layers
from deepspeed.compression.plan import Plan
from deepspeed.compression.remove import removal_of, remove_from
from deepspeed.compression.twin import build, distance, flags_at_random, inputs_for, masked, outputs
from deepspeed.errors import CompressionError
from tests.unit.compression.architectures import FAMILIES, architecture

FAST = ["Llama", "Mixtral", "GPT2", "Phi3", "T5", "Albert", "GPTNeo"]
HEADS = {"Llama", "Mixtral", "Phi3", "T5"}


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def removed_like_masked(model: Any, plan: Plan, shrink: Shrink) -> tuple[float, Any]:
    """The distance, and the model from which half of the units were removed in place."""
    given, before = inputs_for(model, plan.config), parameters(model)
    keeps = flags_at_random(shrink, 0.5)
    without = outputs(masked(model, shrink, keeps), given)
    pairs = list(zip(shrink.families, keeps, strict=True))
    remove_from(model, removal_of(model, plan, pairs))
    assert parameters(model) < before
    return distance(without, outputs(model, given)), model


def check(name: str, kind: str, folder: Path) -> str:
    """`equal`, or the reason of a refusal."""
    from transformers import AutoModel

    model_class, config = architecture(name)
    build(model_class, config).save_pretrained(folder / "dense")
    model = model_class.from_pretrained(folder / "dense").eval()  # what a folder cannot hold is gone now
    plan = Plan(model)
    found = plan.shrinks(kind)
    if not found:
        return plan.refused[kind]
    for shrink in found:
        apart, model = removed_like_masked(model, plan, shrink)
        assert apart <= 1e-5, (name, kind, shrink.changes, apart)
    if getattr(model, "can_generate", lambda: False)() and not config.is_encoder_decoder:
        ids = inputs_for(model, config)["input_ids"]
        new = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, use_cache=True, **new), model.generate(ids, use_cache=False, **new))
    export(model, model.state_dict(), folder)
    loaded = model_class.from_pretrained(folder).eval()
    assert AutoModel is not None and parameters(loaded) == parameters(model)
    given = inputs_for(model, config)
    assert distance(outputs(loaded, given), outputs(model, given)) <= 1e-6
    return "equal"


@pytest.mark.parametrize("name", FAST)
def test_half_of_the_ffn_leaves(name: str, tmp_path: Path) -> None:
    assert check(name, "ffn", tmp_path) == "equal"


@pytest.mark.parametrize("name", FAST)
def test_half_of_the_heads_leave_or_are_refused(name: str, tmp_path: Path) -> None:
    found = check(name, "heads", tmp_path)
    assert (found == "equal") == (name in HEADS), found
    if name not in HEADS:
        assert "fewer heads cannot be said" in found and "layers" in found


def layers_leave(name: str, folder: Path) -> None:
    model_class, config = architecture(name)
    model = build(model_class, config)
    prefix, blocks = next(iter(block_lists(model).items()))
    given, before = inputs_for(model, config), len(blocks)
    kept = list(range(before))[::2]
    keep_layers(model, prefix, kept)
    assert len(dict(model.named_modules())[prefix]) == len(kept) < before
    found = outputs(model, given)
    export(model, model.state_dict(), folder)
    loaded = model_class.from_pretrained(folder).eval()
    assert distance(outputs(loaded, given), found) <= 1e-6
    if getattr(model, "can_generate", lambda: False)() and not config.is_encoder_decoder:
        new = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        ids = given["input_ids"]
        assert torch.equal(model.generate(ids, use_cache=True, **new), model.generate(ids, use_cache=False, **new))


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeo", "Bert"])
def test_layers_leave_and_generate_with_a_cache(name: str, tmp_path: Path) -> None:
    layers_leave(name, tmp_path)


def test_planted_swapped_heads_are_caught() -> None:
    """A fused matrix cut by another layout than the model's own is no removal."""
    model_class, config = architecture("Phi3")
    model = build(model_class, config)
    plan = Plan(model)
    shrink = plan.shrinks("ffn")[0]
    wrong = Shrink(shrink.kind, shrink.changes, shrink.unit, [family.laid(1) for family in shrink.families])
    keeps = flags_at_random(wrong, 0.5)
    given = inputs_for(model, config)
    without = outputs(masked(model, wrong, keeps), given)
    remove_from(model, removal_of(model, plan, list(zip(wrong.families, keeps, strict=True))))
    assert distance(without, outputs(model, given)) > 1e-3


def test_widths_that_differ_by_layer_are_refused() -> None:
    model_class, config = architecture("Llama")
    model = build(model_class, config)
    plan = Plan(model)
    shrink = plan.shrinks("ffn")[0]
    keeps = [torch.arange(48) < kept for kept in (24, 12)]
    with pytest.raises(CompressionError, match="one number of ffn for all layers"):
        removal_of(model, plan, list(zip(shrink.families, keeps, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ffn", "heads", "layers"])
def test_every_family(kind: str, tmp_path: Path) -> None:
    told: dict[str, str] = {}
    for name in FAMILIES:
        folder = tmp_path / name
        try:
            told[name] = "equal"
            if kind == "layers":
                layers_leave(name, folder)
            else:
                told[name] = check(name, kind, folder)
        except Exception as error:  # one line per family, whatever it fails by
            told[name] = f"FAILS {type(error).__name__}: {str(error)[:150]}"
    for name, text in told.items():
        print(f"{kind:7} {name:14} {text[:200]}")
    equal = sum(text == "equal" for text in told.values())
    print(f"{kind}: {equal} of {len(told)}")
    assert not any("AssertionError" in text for text in told.values()), "wrong in silence"
    assert equal >= {"ffn": 48, "heads": 21, "layers": 40}[kind]
