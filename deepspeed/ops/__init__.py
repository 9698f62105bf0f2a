"""Kernels of the optimizers, one package each, every one with a plain-torch form."""

from deepspeed.ops import adagrad, adam, aio, lamb, lion, muon

__all__ = ["adagrad", "adam", "aio", "lamb", "lion", "muon"]
