"""A global batch that many numbers of devices can share evenly, and the `ds_elastic` command."""

from __future__ import annotations

from deepspeed.elasticity.batch import (
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from deepspeed.elasticity.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]
