"""Persistent worker processes, and fixtures that police what tests leave behind."""

from __future__ import annotations

from tests.harness.pool import WorkerError, WorkerPool, WorkerTimeout

__all__ = ["WorkerError", "WorkerPool", "WorkerTimeout"]
