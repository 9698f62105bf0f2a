"""What the package's errors say, read from its source: the list of `docs/errors.md`, made while the site is built."""

from __future__ import annotations

import ast
import builtins
import html
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = "…"  # what a message fills in when it is raised
# the page of a room, where it is not the room's name with hyphens
GUIDES = {
    "aio": "aio", "checkpoint": "checkpoints", "comm": "launcher", "config": "configuration", "elasticity": "launcher",
    "engine": "training", "monitor": "monitoring", "optim": "training", "pipe": "pipeline",
    "sequence": "sequence-parallel", "storage": "offload", "accelerator": "accelerators",
}  # fmt: skip


EVERY = ("object", "BaseException", "Exception", "DeepSpeedError")  # what all of them are


@dataclass(frozen=True)
class Message:
    """A text that is raised somewhere: the class, the text with `…` for what it fills in, the file."""

    error: str
    text: str
    file: str

    @property
    def guide(self) -> str | None:
        """The page that explains what the file does."""
        room = self.file.split("/")[1]
        pages = (GUIDES.get(room), room.replace("_", "-"))
        return next((page for page in pages if page and (ROOT / f"docs/{page}.md").exists()), None)


def _text(node: ast.expr, known: dict[str, ast.expr]) -> str | None:
    """A message's text, as far as the source says it; None where it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else PLACE for part in node.values)  # type: ignore
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left, known), _text(node.right, known)
        return None if left is None and right is None else f"{left or PLACE}{right or PLACE}"
    if isinstance(node, ast.Name) and node.id in known:
        return _text(known[node.id], {})
    return None


def _assigned(function: ast.AST) -> dict[str, ast.expr]:
    return {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _raised(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.Call, ast.AST | None]]:
    """Calls that are raised, each with the innermost function around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.exc, function
        yield from _raised(node, node if isinstance(node, ast.FunctionDef) else function)


@cache
def messages() -> tuple[Message, ...]:
    """Every text that the source raises with one of the package's errors, in the order of files."""
    from deepspeed import errors

    ours = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    found = []
    for path in sorted((ROOT / "deepspeed").rglob("*.py")):
        for call, function in _raised(ast.parse(path.read_text())):
            if isinstance(call.func, ast.Name) and call.func.id in ours:
                text = _text(call.args[0], _assigned(function) if function else {})
                if text and text.replace(PLACE, "").strip():
                    found.append(Message(call.func.id, " ".join(text.split()), path.relative_to(ROOT).as_posix()))
    return tuple(found)


def _cell(text: str) -> str:
    """As code within a table: nothing in it is Markdown."""
    escaped = html.escape(text, quote=False)
    return "<code>" + "".join(f"&#{ord(sign)};" if sign in "|`*_[]\\~^" else sign for sign in escaped) + "</code>"


def page() -> str:
    """A section for each class: what it is, what else catches it, what it says and where."""
    from deepspeed import errors

    said: dict[str, dict[str, Message]] = defaultdict(dict)
    for message in messages():
        said[message.error].setdefault(message.text, message)
    parts = []
    for name, kind in vars(errors).items():
        if not isinstance(kind, type) or name == "DeepSpeedError":
            continue
        caught = [base.__name__ for base in kind.__mro__[1:] if base.__name__ in {*vars(errors), *vars(builtins)}]
        others = ", ".join(f"`{base}`" for base in caught if base not in EVERY)
        also = f"Caught as {others} too." if others else ""
        parts.append(f"## `{name}`\n\n{inspect.getdoc(kind)} {also}\n")
        if said[name]:
            rows = [f"| {_cell(text)} | {_more(said[name][text])} |" for text in sorted(said[name])]
            parts.append("\n".join(["| text | more |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _more(message: Message) -> str:
    return f"[{message.guide}]({message.guide}.md)" if message.guide else f"`{message.file}`"


if __name__ == "__main__":
    print(page())
