"""LoRA adapters of the server: their options, their names in requests, and loading while it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.errors import ArgumentError
from deepspeed.serving.ipc import LoadAdapter, UnloadAdapter
from deepspeed.serving.protocol import APIError, JsonBody, carry_out

OPTION = "--lora-modules"


@dataclass(frozen=True)
class LoraModule:
    """Adapter of the server: its name in requests, its folder, and the name of its base model ("": the served one)."""

    name: str
    path: str
    base_model_name: str = ""


def parse_modules(values: Sequence[str]) -> tuple[LoraModule, ...]:
    """Parse the values of `--lora-modules`: `name=path`, or a JSON object with `name`, `path`, `base_model_name`.

    Raises:
        ArgumentError: a value has another form, or two have one name.
    """
    modules: dict[str, LoraModule] = {}
    for value in values:
        try:
            if value.lstrip().startswith("{"):
                module = LoraModule(**{key: entry for key, entry in json.loads(value).items() if entry is not None})
            else:
                name, _, path = value.partition("=")
                module = LoraModule(name, path)
        except (ValueError, TypeError):
            module = LoraModule("", "")
        if not all(isinstance(entry, str) for entry in vars(module).values()) or not module.name or not module.path:
            raise ArgumentError(f'{OPTION} {value!r}: name=path, or {{"name": …, "path": …, "base_model_name": …}}')
        if module.name in modules:
            raise ArgumentError(f"{OPTION}: there are two adapters {module.name!r}")
        modules[module.name] = module
    return tuple(modules.values())


class LoadBody(JsonBody):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str


class UnloadBody(JsonBody):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


class ServedAdapters:
    """Adapters of the engine by their names in requests.

    Args:
        modules: adapters that the engine has loaded at its start.
        taken: names of the model itself.
        engine: the `EngineProcess`.
    """

    def __init__(self, modules: Sequence[LoraModule], taken: Sequence[str], engine: Any) -> None:
        self._taken, self._engine = tuple(taken), engine
        self.modules = {module.name: module for module in modules}

    def cards(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`, made of that of the model."""
        return [
            {**card, "id": module.name, "root": module.path, "parent": module.base_model_name or card["id"]}
            for module in self.modules.values()
        ]

    def of(self, name: str) -> str | None:
        """Return the name of the adapter that a request for the model `name` uses; None: the model alone."""
        return name if name in self.modules else None

    async def load(self, body: bytes) -> str:
        """Load an adapter by the body of a request; returns a text for the answer.

        Raises:
            APIError: status 400: the body is invalid, the name is empty or in use, or the engine refuses the adapter;
                503: the engine has ended.
        """
        wanted = LoadBody.parse(body)
        if not wanted.lora_name or wanted.lora_name in (*self._taken, *self.modules):
            raise APIError(400, f"The name {wanted.lora_name!r} is in use", "lora_name", "invalid_value")
        # A client that leaves does not interrupt it: engine and server would disagree about the name.
        await asyncio.shield(asyncio.ensure_future(self._load(LoraModule(wanted.lora_name, wanted.lora_path))))
        return f"Success: LoRA adapter '{wanted.lora_name}' added successfully."

    async def _load(self, module: LoraModule) -> None:
        await carry_out(self._engine, lambda ident: LoadAdapter(ident, module.name, module.path), "lora_path")
        self.modules[module.name] = module

    async def unload(self, body: bytes) -> str:
        """Remove an adapter; requests in progress finish with it. `APIError` (404) if there is none of this name."""
        name = UnloadBody.parse(body).lora_name
        if self.modules.pop(name, None) is None:
            raise APIError(404, f"There is no adapter {name!r}", "lora_name", "model_not_found")
        await carry_out(self._engine, lambda ident: UnloadAdapter(ident, name), "lora_path")
        return f"Success: LoRA adapter '{name}' removed successfully."
