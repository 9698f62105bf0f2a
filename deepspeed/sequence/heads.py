"""Heads of Transformers' models, by what they need of a sequence."""

from __future__ import annotations

from torch import nn

# Logits for each token, and a loss that is the mean over the tokens with labels: by slices, with all tokens' count.
TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification")
# Logits or losses of one token, or of all together: a slice has none of them.
WHOLE_HEADS = (
    "ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining",
    "ForQuestionAnswering", "DoubleHeadsModel",
)  # fmt: skip
_LIBRARY = "transformers."


def has_token_head(model: nn.Module) -> bool:
    """Whether its class, or one that it inherits from, labels tokens: a client's has any name."""
    return any(kind.__name__.endswith(TOKEN_HEADS) for kind in type(model).__mro__)


def whole_head(model: nn.Module) -> str:
    """The class of Transformers by which a model has a head over whole sequences; empty where it has none."""
    kinds = (kind for kind in type(model).__mro__ if kind.__module__.startswith(_LIBRARY))
    return next((kind.__name__ for kind in kinds if kind.__name__.endswith(WHOLE_HEADS)), "")


def computes_as_written(model: nn.Module) -> bool:
    """Whether its forward is one of Transformers."""
    return type(model).forward.__module__.startswith(_LIBRARY)
