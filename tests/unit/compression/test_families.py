"""Units read off the model's own config: removed is masked, the folder loads equal, what cannot be said is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.compression.export import export
from deepspeed.compression.pruning.layer_selection import keep_layers
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.structured_removal import remove_from
from deepspeed.compression.pruning.transformers_groups import Shrink
from deepspeed.compression.pruning.verify import build, flags_at_random, inputs_for, masked, outputs
from deepspeed.errors import CompressionError
from deepspeed.foundation.equivalence import relative_difference
from deepspeed.foundation.transformers_model import block_lists
from tests.unit.compression.architectures import FAMILIES, architecture

FAST = ["Llama", "Mixtral", "Qwen2Moe", "GPT2", "Phi3", "T5", "Albert", "GPTNeo"]
HEADS = {"Llama", "Mixtral", "Qwen2Moe", "Phi3", "T5"}


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def removed_like_masked(model: Any, plan: PruningPlan, shrink: Shrink) -> tuple[float, Any]:
    """The distance, and the model from which half of the units were removed in place."""
    given, before = inputs_for(model, plan.config), parameters(model)
    keeps = flags_at_random(shrink, 0.5)
    without = outputs(masked(model, shrink, keeps), given)
    pairs = list(zip(shrink.families, keeps, strict=True))
    remove_from(model, plan.removal_of(pairs))
    assert parameters(model) < before
    return relative_difference(outputs(model, given), without), model


def check(name: str, kind: str, folder: Path) -> str:
    """`equal`, or the reason of a refusal."""
    from transformers import AutoModel

    model_class, config, model = loaded_dense(name, folder)
    plan = PruningPlan(model)
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
    assert relative_difference(outputs(model, given), outputs(loaded, given)) <= 1e-6
    return "equal"


@pytest.mark.parametrize("name", FAST)
def test_half_of_the_ffn_leaves(name: str, tmp_path: Path) -> None:
    assert check(name, "ffn", tmp_path) == "equal"


@pytest.mark.parametrize("name", FAST)
def test_half_of_the_heads_leave_or_are_refused(name: str, tmp_path: Path) -> None:
    found = check(name, "heads", tmp_path)
    assert (found == "equal") == (name in HEADS), found
    if name not in HEADS:
        assert "fewer heads cannot be expressed" in found and "layers" in found


def loaded_dense(name: str, folder: Path) -> tuple[Any, Any, Any]:
    """(class, config, model) of a folder: what one cannot hold, as computed positions, is gone."""
    model_class, config = architecture(name)
    build(model_class, config).save_pretrained(folder / "dense")
    return model_class, config, model_class.from_pretrained(folder / "dense").eval()


def layers_leave(name: str, folder: Path) -> None:
    model_class, config, model = loaded_dense(name, folder)
    lists = block_lists(model)
    prefix, blocks = next((one for one in lists.items() if "decoder" in one[0]), next(iter(lists.items())))
    given, before = inputs_for(model, config), len(blocks)
    kept = list(range(before))[1::2]
    try:
        keep_layers(model, prefix, kept)
    except CompressionError as error:  # the first block of a T5 holds what all others use
        assert "keep the first block" in str(error)
        keep_layers(model, prefix, kept := [0])
    assert len(dict(model.named_modules())[prefix]) == len(kept) < before
    found = outputs(model, given)
    export(model, model.state_dict(), folder)
    loaded = model_class.from_pretrained(folder).eval()
    assert relative_difference(found, outputs(loaded, given)) <= 1e-6
    if getattr(model, "can_generate", lambda: False)() and not config.is_encoder_decoder:
        new = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        ids = given["input_ids"]
        assert torch.equal(model.generate(ids, use_cache=True, **new), model.generate(ids, use_cache=False, **new))


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeo", "Bert"])
def test_layers_leave_and_generate_with_a_cache(name: str, tmp_path: Path) -> None:
    layers_leave(name, tmp_path)


@pytest.mark.parametrize("name", ["T5", "Bart", "Marian"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_one_side_of_an_encoder_decoder_gets_shallower(name: str, side: str, tmp_path: Path) -> None:
    model_class, config, model = loaded_dense(name, tmp_path)
    lists = block_lists(model)
    prefix, other = (next(p for p in lists if s in p) for s in (side, {"encoder": "decoder"}.get(side, "encoder")))
    if (name, side) == ("T5", "encoder"):
        with pytest.raises(CompressionError, match="makes a cache of 1 layers"):
            keep_layers(model, prefix, [0])
        keep_layers(model, other, [0])
        keep_layers(model, prefix, [0])
    else:
        keep_layers(model, prefix, [0])
        assert len(model.get_submodule(other)) == 2
    assert len(model.get_submodule(prefix)) == 1
    given = inputs_for(model, config)
    found = outputs(model, given)
    export(model, model.state_dict(), tmp_path)
    loaded = model_class.from_pretrained(tmp_path).eval()
    assert relative_difference(found, outputs(loaded, given)) <= 1e-6
    new = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "decoder_start_token_id": 0}
    ids = given["input_ids"]
    assert torch.equal(model.generate(ids, use_cache=True, **new), model.generate(ids, use_cache=False, **new))


def test_a_block_that_is_not_like_the_others_stays_first() -> None:
    model_class, config = architecture("T5")
    model = build(model_class, config)
    with pytest.raises(CompressionError, match="keep the first block where it is"):
        keep_layers(model, "decoder.block", [1])


def test_planted_swapped_heads_are_caught() -> None:
    """A fused matrix cut by another layout than the model's own is no removal."""
    model_class, config = architecture("Phi3")
    model = build(model_class, config)
    plan = PruningPlan(model)
    shrink = plan.shrinks("ffn")[0]
    wrong = Shrink(shrink.kind, shrink.changes, shrink.unit, [family.laid(1) for family in shrink.families])
    keeps = flags_at_random(wrong, 0.5)
    given = inputs_for(model, config)
    without = outputs(masked(model, wrong, keeps), given)
    remove_from(model, plan.removal_of(list(zip(wrong.families, keeps, strict=True))))
    assert relative_difference(outputs(model, given), without) > 1e-3


def test_numbers_that_a_config_cannot_be_saved_with_are_refused_before_they_leave() -> None:
    """Transformers saves no Llama whose width is no multiple of its heads, though it builds and runs."""
    from deepspeed.compression import init_compression
    from deepspeed.compression.cli import plan_rows
    from tests.unit.compression.test_calls import config as block
    from tests.unit.compression.test_calls import technique

    model_class, config = architecture("Llama")
    config.num_key_value_heads = 4
    group = {"g": {"params": {"dense_ratio": 2 / 3}, "modules": ["o_proj"]}}
    section = block(technique("head_pruning", group, method="l1"))
    with pytest.raises(
        CompressionError, match=r"cannot say 3 of 4 heads units.*the nearest .* is 2 \(dense_ratio 0.5\)"
    ):
        init_compression(build(model_class, config), section)
    rows = plan_rows(build(model_class, config), config, ["heads"], 2 / 3)
    assert "cannot say 3 of 4" in rows[1]["refused"]
    section["compression_training"]["head_pruning"]["shared_parameters"]["physical"] = False
    init_compression(build(model_class, config), section)  # masks are no matter of the config


def test_widths_that_differ_by_layer_are_refused() -> None:
    model_class, config = architecture("Llama")
    model = build(model_class, config)
    plan = PruningPlan(model)
    shrink = plan.shrinks("ffn")[0]
    keeps = [torch.arange(48) < kept for kept in (24, 12)]
    with pytest.raises(CompressionError, match="one number of ffn for all layers"):
        plan.removal_of(list(zip(shrink.families, keeps, strict=True)))


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
