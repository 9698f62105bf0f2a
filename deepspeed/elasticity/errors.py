"""What can be wrong with an `elasticity` block."""

from __future__ import annotations

from deepspeed.errors import DeepSpeedConfigError


class ElasticityError(DeepSpeedConfigError):
    """The `elasticity` block cannot be served."""


class ElasticityConfigError(ElasticityError):
    """A key of the block is missing or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch of the block cannot be shared by this number of ranks."""
