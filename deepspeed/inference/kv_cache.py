"""Block pool of the KV cache: reference counts and prefix caching. It manages block numbers; executors own the tensors.

"Page" and "block" mean the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed.errors import MemoryExhaustedError, UsageError

MOST_LOOKED_AT = 8  # pages with a common first token, compared for a partial match


@dataclass(eq=False)
class PrefixBlock:
    """Node of the prefix tree: one full page, with tokens that follow those of its ancestors.

    `children` is keyed by the tokens of the child, not by a hash, so collisions are impossible. `by_first` has the same
    children, grouped by first token. `alive` becomes False when the node leaves the tree.
    """

    page: int
    parent: PrefixBlock | None = None
    tokens: tuple[int, ...] = ()
    children: dict[tuple[int, ...], PrefixBlock] = field(default_factory=dict)
    by_first: dict[int, dict[tuple[int, ...], PrefixBlock]] = field(default_factory=dict)
    alive: bool = True


@dataclass(frozen=True)
class Match:
    """Nodes of the prefix tree that match the beginning of a prompt: `nodes` in full, then `tail` (None: no such node)
    in its first `partial` tokens."""

    nodes: list[PrefixBlock]
    tail: PrefixBlock | None = None
    partial: int = 0


class BlockPool:
    """Pool of pages with reference counts. A page is free, used by one or more sequences, or cached (full and unused).

    Cached pages are evicted, least recently used first, when no page is free.

    Args:
        count: number of pages.
        size: tokens per page.
        reuse: whether full pages are cached for prompts with the same beginning.
    """

    def __init__(self, count: int, size: int, reuse: bool = True) -> None:
        self.count, self.size, self.reuse = count, size, reuse
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._nodes: dict[int, PrefixBlock] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.root = PrefixBlock(page=-1)

    @property
    def available(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free) + len(self._cached)

    def references(self, page: int) -> int:
        """Return the number of sequences that use `page`."""
        return self._references[page]

    def take(self) -> int:
        """Allocate a page for one sequence and return its number.

        Raises:
            MemoryExhaustedError: all pages are in use.
        """
        if not self._free:
            if not self._cached:
                raise MemoryExhaustedError(f"all {self.count} pages of the cache are held; raise cache_bytes")
            self._forget(self._nodes[next(iter(self._cached))])
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Increment the reference count of a used or cached page."""
        self._cached.pop(page, None)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Decrement the reference count of a page; at 0, the page is cached if it is in the prefix tree, else free.

        Raises:
            UsageError: the page is not in use.
        """
        if not 0 <= page < self.count or self._references[page] < 1:
            raise UsageError(f"page {page} of {self.count} is not in use, so it cannot be released")
        self._references[page] -= 1
        if not self._references[page]:
            if page in self._nodes:
                self._cached[page] = None
            else:
                self._free.append(page)

    def writable(self, page: int) -> bool:
        """Whether a sequence may write to `page`: it is neither shared nor in the prefix tree."""
        return self._references[page] == 1 and page not in self._nodes

    def remember(self, parent: PrefixBlock, tokens: Sequence[int], page: int) -> PrefixBlock | None:
        """Add the full `page` with `tokens` to the prefix tree under `parent`.

        Returns:
            The new node, or the existing node for the same tokens; None if `parent` left the tree or `reuse` is off.
        """
        if not self.reuse or not parent.alive:
            return None
        key = tuple(tokens)
        if (known := parent.children.get(key)) is not None:
            return known
        node = parent.children[key] = PrefixBlock(page, parent, key)
        parent.by_first.setdefault(key[0], {})[key] = node
        self._nodes[page] = node
        return node

    def match(self, tokens: Sequence[int], root: PrefixBlock | None = None) -> Match:
        """Find pages in the prefix tree for the first of `tokens`, but not the last, whose logits must be computed.

        `root`: root of another tree, with pages of the same tokens under other weights; None: the pool's own.
        """
        nodes: list[PrefixBlock] = []
        start, most, node = 0, len(tokens) - 1, root or self.root
        while self.reuse and start + self.size <= most:
            child = node.children.get(tuple(tokens[start : start + self.size]))
            if child is None:
                break
            nodes.append(child)
            node, start = child, start + self.size
        tail, partial = self._alike(node, tokens[start:most]) if self.reuse and start < most else (None, 0)
        return Match(nodes, tail, partial)

    def _alike(self, node: PrefixBlock, rest: Sequence[int]) -> tuple[PrefixBlock | None, int]:
        best, length = None, 0
        for looked, (key, child) in enumerate(node.by_first.get(rest[0], {}).items()):
            if looked == MOST_LOOKED_AT:
                break
            same = next(
                (i for i, (a, b) in enumerate(zip(key, rest, strict=False)) if a != b), min(len(key), len(rest))
            )
            if same > length:
                best, length = child, same
        return best, length

    def _forget(self, node: PrefixBlock) -> None:
        """Remove a node and its descendants from the prefix tree."""
        if node.parent is not None:
            del node.parent.children[node.tokens]
            alike = node.parent.by_first[node.tokens[0]]
            del alike[node.tokens]
            if not alike:
                del node.parent.by_first[node.tokens[0]]
        stack = [node]
        while stack:
            dropped = stack.pop()
            dropped.alive, dropped.parent = False, None
            stack.extend(dropped.children.values())
            dropped.children.clear()
            dropped.by_first.clear()
            del self._nodes[dropped.page]
            if dropped.page in self._cached:
                del self._cached[dropped.page]
                self._free.append(dropped.page)

    def forget_all(self) -> None:
        """Empty all prefix trees; necessary after a change of the weights."""
        while self._nodes:
            self._forget(next(iter(self._nodes.values())))

    def forget_tree(self, root: PrefixBlock) -> None:
        """Empty another tree than the pool's own, for good: its sequences add no more pages to it."""
        root.alive = False
        for node in list(root.children.values()):
            self._forget(node)
