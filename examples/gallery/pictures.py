"""What the examples of this folder draw with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path, columns: int = 1) -> Iterator[Any]:
    """Axes, one or a row of them, that become the file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(5.5 * columns, 3.8))
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"picture: {path}", flush=True)


def digits(test: int = 360) -> tuple[Any, Any, Any, Any]:
    """Images fp32 `[n, 1, 8, 8]` and labels of training and test, from scikit-learn."""
    import torch

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits come from scikit-learn: pip install scikit-learn") from None
    found: Any = load_digits()
    order = torch.randperm(len(found.images), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(found.images, dtype=torch.float32)[:, None] / 16)[order]
    labels = torch.tensor(found.target)[order]
    return images[test:], labels[test:], images[:test], labels[:test]
