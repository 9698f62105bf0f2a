"""Seeded JSON schemas of the kinds of the JSON Schema test suite, whose texts cannot be long."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["name", "größe", "日本", "a b", 'x"y', "emoji🙂", "back\\slash", "tab\t", "id", "é", "value", "-"]


def _string(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": draw.choice(["^[a-f]{1,4}$", "^\\d{3}-\\d{2}$", "^(ab|cd)+x?$"][:2])}
    if kind == 1:
        return {"type": "string", "format": draw.choice(["date", "time", "ipv4", "uuid"])}
    least = draw.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 4)}


def _number(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-1000, 100)
    kind = draw.randrange(3)
    if kind == 0:
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
    if kind == 1:
        return {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 200, "multipleOf": draw.choice([2, 5, 7])}
    return {"enum": [low, low / 8, 1e10, -0.5, 0]}


def _enum(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(3)
    if kind == 0:
        return {"const": draw.choice([None, True, "ü\n", {"a": [1, {"b": None}]}, [], 0])}
    if kind == 1:
        return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}
    return {"enum": draw.sample([*WORDS, None, False, 7, [1, "x"], {"k": "v"}], draw.randint(1, 4))}


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    if draw.random() < 0.3:
        return {"type": "array", "prefixItems": [_schema(draw, depth - 1) for _ in range(2)], "items": False,
                "minItems": 2}  # fmt: skip
    return {"type": "array", "items": _schema(draw, depth - 1), "minItems": least, "maxItems": least + 1}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(0, 3))
    properties = {name: _schema(draw, depth - 1) for name in names}
    required = [name for name in names if draw.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0:
        return draw.choice([_string, _number, _enum])(draw)
    kind = draw.randrange(8)
    if kind < 3:
        return _object(draw, depth)
    if kind < 5:
        return _array(draw, depth)
    if kind == 5:
        return {"anyOf": [_schema(draw, depth - 1), _schema(draw, depth - 2)]}
    if kind == 6:
        return {"$ref": draw.choice(["#/$defs/leaf", "#/$defs/pair"])}
    return draw.choice([_string, _number, _enum])(draw)


def schemas(count: int, seed: int = 5) -> list[dict[str, Any]]:
    """So many schemas with references, three levels deep."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        root = (_object if number % 2 else _schema)(draw, 2)
        pair = {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 1, "maxItems": 2}
        made.append({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"schema {number}", **root,
                     "$defs": {"leaf": _schema(draw, 0), "pair": pair}})  # fmt: skip
    return made
