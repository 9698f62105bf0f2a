"""Muon."""

from deepspeed.ops.muon.muon import Muon, orthogonalize

__all__ = ["Muon", "orthogonalize"]
