"""A Keras model learns handwritten digits: `deepspeed --num_gpus 2 examples/keras/digits.py`.

The model is Keras', on its torch backend; ZeRO splits it. Batches are numpy arrays, of tf.data with `--pipeline tf`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from torch.nn import functional as F

import deepspeed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gallery"))
from pictures import digits, picture  # noqa: E402

MICRO = 32


def network() -> keras.Model:
    """A functional model with BatchNormalization and Dropout; images `[n, 8, 8, 1]`."""
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    x = inputs
    for width in (24, 48):
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(64, 3, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(10)(layers.Dropout(0.1, seed=1)(x)))


def batches(images: np.ndarray, labels: np.ndarray, epoch: int, rank: int, ranks: int) -> Iterator[Any]:
    """This rank's share of an epoch, as numpy arrays."""
    order = np.random.default_rng(epoch).permutation(len(images))[rank::ranks]
    for at in range(0, len(order), MICRO):
        yield images[order[at : at + MICRO]], labels[order[at : at + MICRO]]


def tf_batches(images: np.ndarray, labels: np.ndarray, epoch: int, rank: int, ranks: int) -> Any:
    """The same by tf.data, which reads only: the model does not run there."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shard(ranks, rank)
    return data.shuffle(len(images), seed=epoch).batch(MICRO).prefetch(2).as_numpy_iterator()


def main() -> None:
    """Train, save as `.keras`, load that in plain Keras, measure, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--pipeline", choices=["numpy", "tf"], default="numpy")
    parser.add_argument("--output", type=Path, default=Path("runs/keras"))
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    images, labels, test_images, test_labels = (part.numpy() for part in digits())
    images, test_images = images.transpose(0, 2, 3, 1), test_images.transpose(0, 2, 3, 1)
    keras.utils.set_random_seed(0)
    model = network()
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": given.stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    pipeline = tf_batches if given.pipeline == "tf" else batches
    losses = []
    for epoch in range(given.epochs):
        share = pipeline(images, labels, epoch, engine.get_data_parallel_rank(), engine.dp_world_size)
        for x, y in engine.loop(share, progress=True):
            loss = F.cross_entropy(engine(torch.tensor(x), training=True), torch.tensor(y))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    first = engine.global_rank == 0
    with deepspeed.zero.GatheredParameters(list(model.parameters())):  # all ranks
        if first:
            given.output.mkdir(parents=True, exist_ok=True)
            model.save(given.output / "digits.keras")
    engine.destroy()
    if first:
        loaded = keras.models.load_model(given.output / "digits.keras")
        said = loaded.predict(test_images, verbose=0).argmax(1)
        right = 100 * (said == test_labels).mean()
        with picture(given.output / "digits.png") as axes:
            axes.plot(losses, linewidth=0.8)
            axes.set(xlabel="step", ylabel="loss", yscale="log", title=f"{right:.1f} % of {len(said)} unseen digits")
        print(f"{right:.1f} % of the unseen digits are named right by {given.output / 'digits.keras'} in plain Keras")


if __name__ == "__main__":
    main()
