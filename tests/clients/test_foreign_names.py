"""What the package imports and reads of the installed clients is there: a release that renames it fails here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from deepspeed.errors import NotAvailableError
from deepspeed.foundation.hf_forward import counts_items
from deepspeed.sequence.transformers_adapter import _whole_loss
from tests.architecture.sources import trees

CLIENTS = ("transformers", "accelerate", "lightning", "peft", "trl")
READ = {  # attributes that are asked for with a default, so that their loss would go unnoticed
    transformers.PreTrainedModel: (
        "_can_set_attn_implementation", "set_attn_implementation", "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict", "base_model_prefix", "main_input_name", "get_input_embeddings",
        "get_output_embeddings", "loss_function",
    ),
    transformers.PreTrainedConfig: (
        "get_text_config", "to_dict", "sub_configs", "attribute_map", "_attn_implementation", "base_model_tp_plan",
    ),
    transformers.GenerationConfig: ("to_diff_dict", "from_pretrained"),
}  # fmt: skip
OF_CONFIGS = ("_attn_implementation_internal", "is_encoder_decoder", "vocab_size", "num_hidden_layers", "use_cache",
              "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "hidden_size", "pad_token_id",
              "rope_parameters")  # fmt: skip


def _imported() -> Iterator[tuple[str, str, str]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in CLIENTS:
                yield from ((path, str(node.module), alias.name) for alias in node.names)


def test_every_name_that_is_imported_is_there() -> None:
    names = set(_imported())
    missing = [f"{path}: {module}.{name}" for path, module, name in sorted(names)
               if not hasattr(importlib.import_module(module), name)]  # fmt: skip
    assert not missing and ("inference/executors/paged.py", "transformers.cache_utils", "Cache") in names


@pytest.mark.parametrize("owner", READ, ids=lambda owner: owner.__name__)
def test_every_attribute_that_is_read_is_there(owner: type) -> None:
    assert [name for name in READ[owner] if not hasattr(owner, name)] == []


@pytest.mark.parametrize("loss", [ForCausalLMLoss, ForMaskedLMLoss])
def test_losses_count_items(loss: Callable[..., Any]) -> None:
    assert counts_items(loss)
    assert _whole_loss(loss, "ForCausalLM") is not loss


def test_a_loss_that_counts_no_items_is_refused_over_cut_sequences() -> None:
    """It is the mean over a rank's tokens, which would be summed over ranks."""

    def mean(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))

    assert not counts_items(mean)
    with pytest.raises(NotAvailableError, match=r"the loss mean does not divide .* num_items_in_batch"):
        _whole_loss(mean, "ForCausalLM")
    assert _whole_loss(mean, "ForQuestionAnswering") is mean  # is not called with slices' tokens


def test_every_attribute_of_a_config_is_there() -> None:
    config = transformers.LlamaConfig()
    assert [name for name in OF_CONFIGS if not hasattr(config, name)] == []
