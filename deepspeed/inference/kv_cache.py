"""Block pool of the KV cache: reference counts, and prefix caching of full blocks. No tensors.

Arguments (`page_size`), attributes and messages call a block a page; both words mean the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed.errors import MemoryExhaustedError, UsageError

MOST_LOOKED_AT = 8  # pages with a common first token, compared for a partial match


@dataclass(eq=False)
class PrefixBlock:
    """Full page in the prefix tree: its tokens follow those of its ancestors. `children` is keyed by the tokens
    themselves, not by a hash alone, so hash collisions cannot match."""

    page: int
    parent: PrefixBlock | None = None
    tokens: tuple[int, ...] = ()
    children: dict[tuple[int, ...], PrefixBlock] = field(default_factory=dict)
    by_first: dict[int, dict[tuple[int, ...], PrefixBlock]] = field(default_factory=dict)
    alive: bool = True


@dataclass(frozen=True)
class Match:
    """Cached pages for the beginning of a prompt: full matches, and a last page with `partial` matching tokens."""

    nodes: list[PrefixBlock]
    tail: PrefixBlock | None = None
    partial: int = 0


class BlockPool:
    """Pool of `count` pages of `size` tokens. A page is free, held by one or more sequences, or cached (full and held
    by none). Cached pages are evicted, least recently used first, when no page is free."""

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
        """Return the number of sequences that hold `page`."""
        return self._references[page]

    def take(self) -> int:
        """Allocate a page for one sequence to write to."""
        if not self._free:
            if not self._cached:
                raise MemoryExhaustedError(f"all {self.count} pages of the cache are held; raise cache_bytes")
            self._forget(self._nodes[next(iter(self._cached))])
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a sequence to the holders of a held or cached page."""
        self._cached.pop(page, None)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Remove a holder of a page; without holders, the page is cached if it is in the prefix tree, else free."""
        if not 0 <= page < self.count or self._references[page] < 1:
            raise UsageError(f"page {page} of {self.count} is not in use, so it cannot be released")
        self._references[page] -= 1
        if not self._references[page]:
            if page in self._nodes:
                self._cached[page] = None
            else:
                self._free.append(page)

    def writable(self, page: int) -> bool:
        """Whether the holder of a page may write to it: the page is neither shared nor in the prefix tree."""
        return self._references[page] == 1 and page not in self._nodes

    def remember(self, parent: PrefixBlock, tokens: Sequence[int], page: int) -> PrefixBlock | None:
        """Add the full `page` to the prefix tree under `parent`. Returns the existing node for the same tokens if there
        is one; None if `parent` was evicted."""
        if not self.reuse or not parent.alive:
            return None
        key = tuple(tokens)
        if (known := parent.children.get(key)) is not None:
            return known
        node = parent.children[key] = PrefixBlock(page, parent, key)
        parent.by_first.setdefault(key[0], {})[key] = node
        self._nodes[page] = node
        return node

    def match(self, tokens: Sequence[int]) -> Match:
        """Find cached pages for the beginning of `tokens`; at least the last token is left to compute."""
        nodes: list[PrefixBlock] = []
        start, most, node = 0, len(tokens) - 1, self.root
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
        """Empty the prefix tree, after the weights have changed."""
        for node in list(self.root.children.values()):
            self._forget(node)
