"""Sending the weights of a model in training to a server (`ds_serve --allow-weight-updates`), through shared memory."""

from __future__ import annotations

import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.process_group import get_rank, is_initialized
from deepspeed.errors import DeepSpeedError, NotAvailableError, PackingError, UsageError
from deepspeed.inference.executors.engine_weights import trained_model
from deepspeed.inference.shared_tensors import DTYPES
from deepspeed.inference.trained_lora import base_of, delta_weight, has_adapters, is_lora
from deepspeed.inference.weight_update import SHARED
from deepspeed.zero.api.gathered_parameters import GatheredParameters

BUCKET = 64 << 20  # bytes of tensors in one message


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a model in training, one at a time; LoRA's changes are added in fp32.

    At stage 3 each tensor is gathered for itself, so all ranks iterate, and no more than one is in memory. Names are
    those of the model without its LoRA layers. A weight itself is never changed.

    Args:
        model: model or engine.
    """
    inner = trained_model(model)
    layers = {name: module for name, module in inner.named_modules() if is_lora(module)}
    for name, module in inner.named_modules():
        if (has_adapters(module) or name in layers) and not _is_plain(module):
            raise NotAvailableError(f"{name}: weights with adapters other than LoRA of linear layers cannot be sent")
    for name, param in inner.named_parameters():
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        kind = name.rpartition(".")[2]
        if owner is None:
            with GatheredParameters([param]):
                yield name, param.detach()
        elif ".base_layer." in name or name in (f"{owner}.weight", f"{owner}.bias"):
            halves = [] if kind != "weight" else list(layers[owner].parameters())
            with torch.no_grad(), GatheredParameters([param, *halves]):
                change = delta_weight(layers[owner]) if kind == "weight" else None
                tensor = param.detach()
                tensor = tensor if change is None else (tensor.float() + change).to(tensor.dtype)
                yield f"{owner}.{kind}", tensor


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer with adapters is a linear layer with LoRA, without a variant of it."""
    try:
        return (
            is_lora(module) and isinstance(base_of(module), nn.Linear) and not getattr(module, "fan_in_fan_out", False)
        )
    except PackingError:
        return False


class WeightSender:
    """Sender of weights to a server on this machine.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        api_key: the server's key; "": none.
        mode: requests under way finish with the old weights ("wait") or end with an error ("abort").
        timeout: seconds for each message; "begin" waits for the requests under way.
    """

    def __init__(self, url: str, api_key: str = "", mode: str = "wait", timeout: float = 600.0) -> None:
        self._url, self._key, self._mode, self._timeout = url.rstrip("/"), api_key, mode, timeout

    def send(self, model: nn.Module) -> int | None:
        """Send all weights; returns the server's new version on rank 0, None on the others. All ranks call this.

        Raises:
            DeepSpeedError: the server refuses a message or does not answer; the message says why.
        """
        tensors = whole_tensors(model)
        if is_initialized() and get_rank() != 0:
            for _ in tensors:
                pass
            return None
        try:
            return self._send(tensors)
        finally:
            for _ in tensors:  # after an error too: the other ranks gather every tensor
                pass

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        self._post({"action": "begin", "mode": self._mode})
        with tempfile.NamedTemporaryFile(dir=SHARED, prefix="ds-weights-") as file:
            entries: list[dict[str, Any]] = []
            for name, tensor in tensors:
                if entries and file.tell() + tensor.nbytes > BUCKET:
                    self._flush(file, entries)
                entries.append(self._write(file, name, tensor))
            if entries:
                self._flush(file, entries)
        return self._post({"action": "end"})["weights_version"]

    @staticmethod
    def _write(file: Any, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise UsageError(f"{name} is {dtype}; weights are sent in {', '.join(DTYPES)}")
        offset = file.tell()
        file.write(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        file.write(bytes(-file.tell() % 8))
        return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}

    def _flush(self, file: Any, entries: list[dict[str, Any]]) -> None:
        file.flush()
        self._post({"action": "tensors", "shared_memory": os.path.basename(file.name), "tensors": entries})
        entries.clear()
        file.seek(0)
        file.truncate()

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(f"{self._url}/update_weights", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise DeepSpeedError(f"{self._url}/update_weights: {error.read().decode(errors='replace')[:500]}") from None
        except OSError as error:
            raise DeepSpeedError(f"{self._url}/update_weights: {error}") from None
