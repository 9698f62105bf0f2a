"""Splits a backward pass: input gradients first, weight gradients of matrix products later.

[Note: what is put off] autograd's graph of a micro-batch is read before its backward. Consider a product `x @ w` whose
right side leads to parameters to which nothing else in the graph leads. Backward skips this edge, so autograd does not
multiply for it. The product's gradient and `x` are kept; `weights` multiplies them as autograd would have, and sends
the result along the same edge: casts, transpositions and hooks of parameters run as usual, once. So the model needs no
change. All other gradients are computed immediately: biases, norms, embeddings, a weight that is also used in another
way or very often, products of three dims, blocks that are recomputed in backward (their saved tensors can be read only
once; with torch's older checkpoint, the whole part), compiled pieces, and a part whose input needs no gradient: no
stage waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from deepspeed.errors import PipelineError

Roots = Sequence[Any]  # edges or tensors
Gradients = Sequence[torch.Tensor] | None
# By the name of autograd's node: which of its edges is that of the right factor, and what it calls the left one.
_PRODUCTS = {"MmBackward0": (1, "self"), "AddmmBackward0": (2, "mat1")}
_REENTRANT = "CheckpointFunctionBackward"  # it refuses a backward that leaves something out
_ACCUMULATES = "AccumulateGrad"
_KINDS = {*_PRODUCTS, _REENTRANT, _ACCUMULATES}
_ANCHOR, _LEAF = 1, 2  # what is below a node: the anchor, any leaf
_MOST = 4  # gradients that meet are formed together: a weight that more products use gets them at once, one by one


@dataclass
class _Product:
    """A product whose right factor gets its gradient later.

    Args:
        edge: that this gradient goes down.
        left: the other factor; what led to it is not held.
        transposed: the right factor is stored by columns: autograd multiplies the other way round.
        gradient: of the product, once backward has come to it.
        versions: of both then.
    """

    edge: GradientEdge
    left: torch.Tensor
    transposed: bool
    gradient: torch.Tensor | None = None
    versions: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, node: Node, edge: GradientEdge) -> _Product:
        """The product that a node of the graph multiplies."""
        left = getattr(node, f"_saved_{_PRODUCTS[type(node).__name__][1]}").detach()
        rows, strides = node._saved_mat2_sym_sizes[0], node._saved_mat2_sym_strides  # type: ignore[attr-defined]
        return cls(edge, left, strides[0] == 1 and strides[1] == rows)

    def multiplied(self) -> torch.Tensor:
        """The gradient of the right factor, as autograd forms it."""
        left, gradient = self.left, self.gradient
        if gradient is None or (left._version, gradient._version) != self.versions:
            raise PipelineError(
                f"the input {list(left.shape)} of a product with a weight, or its gradient, was changed in place "
                f'before the gradient of the weight was formed: take the schedule "1f1b", which forms it at once'
            )
        return gradient.t().mm(left).t() if self.transposed else left.t().mm(gradient)


@dataclass
class _Group:
    """Products whose gradients meet further down: they go there together, as in one backward.

    Args:
        nodes: of the graph, from their edges down.
        products: all of them, by the node that multiplies.
        came: those that backward has come to, in its order.
    """

    nodes: set[Node]
    products: dict[Node, _Product]
    came: list[_Product] = field(default_factory=list)

    def listen(self) -> None:
        """Be told when backward comes to the products."""
        for node, product in self.products.items():
            node.register_prehook(lambda gradients, product=product: self._arrive(product, gradients[0]))
        self.products = {}  # a node holds its hooks: they must not hold it

    def _arrive(self, product: _Product, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # None: nothing led there
            product.gradient, product.versions = gradient, (product.left._version, gradient._version)
            self.came.append(product)

    def leaves(self) -> list[torch.Tensor]:
        """The parameters."""
        return [node.variable for node in self.nodes if type(node).__name__ == _ACCUMULATES]  # type: ignore[attr-defined]

    def send(self) -> None:
        """Multiply, and go down."""
        if self.came:
            torch.autograd.backward(
                [product.edge for product in self.came], [product.multiplied() for product in self.came]
            )


class SplitBackward:
    """The backward of a micro-batch through a part of the model, in two.

    `anchor` is the leaf that received tensors hang on; None: nobody waits for a gradient, nothing is put off.
    """

    def __init__(self, anchor: torch.Tensor | None) -> None:
        self._anchor = anchor
        self._groups: list[_Group] = []
        self._now: dict[int, torch.Tensor] = {}  # leaves of this backward, by id
        self._later: set[int] = set()
        self._hides = anchor is None  # not known which leaves get a gradient now

    @property
    def kept(self) -> int:
        """Bytes that are kept for weights."""
        pairs = [(product.left, product.gradient) for group in self._groups for product in group.came]
        return sum(t.nbytes for pair in pairs for t in pair if t is not None)

    def read(self, roots: Roots) -> None:
        """Find what a backward from the roots can put off."""
        if self._anchor is None:
            return
        nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        graph = _Graph([node for node in nodes if node is not None], self._anchor)
        self._groups = graph.groups()
        self._now = {id(leaf): leaf for leaf in graph.leaves()}
        self._later = {id(leaf) for group in self._groups for leaf in group.leaves()}
        self._hides = graph.refuses  # what is computed again has a graph of its own, with leaves of its own

    def overtakes(self, earlier: SplitBackward) -> bool:
        """Whether this backward may give a gradient now that another one has put off; after `read`."""
        return self._hides or not earlier._later.isdisjoint(self._now)

    def backward(self, roots: Roots, gradients: Gradients = None) -> None:
        """Backward without what is put off, after `read`; without gradients the root is a loss."""
        now, self._now = list(self._now.values()), {}
        torch.autograd.backward(roots, gradients, inputs=now if self._groups else None)

    def weights(self) -> None:
        """The rest of it, weight by weight; a second call finds nothing left."""
        self._later.clear()
        while self._groups:
            self._groups.pop().send()  # the last layers first, and each is let go


class _Graph:
    """The graph of a micro-batch, as it is read from its roots; what leads to `anchor` is not put off."""

    def __init__(self, roots: list[Node], anchor: torch.Tensor) -> None:
        self._nexts: dict[Node, Any] = {}  # what is below: nodes or None, and numbers
        self._found: dict[Node, int] = {}  # what is known to be below
        self._above: dict[Node, list[Node]] = {}  # where the anchor is not below
        self._edges: dict[Node, GradientEdge] = {}  # of products: what may be put off
        self._products: dict[Node, list[Node]] = {}  # by the node of their edge
        self._leaves: list[Node] = []
        self.refuses = False
        for root in roots:
            self._read(root, anchor)
        for node, below in self._found.items():
            if not below & _ANCHOR:
                for child, _ in self._nexts[node]:
                    self._above.setdefault(child, []).append(node)
        self.now: set[Node] = set()
        self._reaches: set[Node] = set()  # of those in `_above`: from here down is something of this backward
        self._keep(roots)

    def _read(self, root: Node, anchor: torch.Tensor) -> None:
        """All that is below a node, from below: every micro-batch waits for it."""
        nexts, known, open_ = self._nexts, self._found, [root]
        while open_:
            node = open_[-1]
            if node in known:
                open_.pop()
                continue
            below = nexts.get(node)
            if below is None:
                below = nexts[node] = node.next_functions
                waits = False
                for child, _ in below:
                    if child is not None and child not in known:
                        open_.append(child)
                        waits = True
                if waits:
                    continue
            open_.pop()
            here = 0
            for child, _ in below:
                if child is not None:
                    here |= known[child]
            known[node] = here
            kind = type(node).__name__
            if kind in _KINDS:
                self._judge(node, kind, anchor)

    def _judge(self, node: Node, kind: str, anchor: torch.Tensor) -> None:
        """A leaf, or a product all of whose factors are known."""
        if kind == _ACCUMULATES:
            self._leaves.append(node)
            self._found[node] = _ANCHOR | _LEAF if node.variable is anchor else _LEAF  # type: ignore[attr-defined]
        elif kind == _REENTRANT:
            self.refuses = True
        elif (edge := self._right_factor(node)) is not None and not self._found[edge.node] & _ANCHOR:
            others = [child for child, _ in self._nexts[node] if child is not None]
            others.remove(edge.node)
            # It must be no other factor too, and autograd would not come here at all for nothing else.
            if edge.node not in others and any(self._found[child] & _LEAF for child in others):
                self._edges[node] = edge
                self._products.setdefault(edge.node, []).append(node)

    def _keep(self, nodes: list[Node]) -> None:
        """These and what is below them are for this backward, and so is what it comes to by another way too."""
        now, nexts, known, edges = self.now, self._nexts, self._found, self._edges
        open_ = list(nodes)
        while open_:
            node = open_.pop()
            if node in now:
                continue
            now.add(node)
            apart = edges[node].node if node in edges else None
            if apart in self._reaches:
                apart = None
                del edges[node]
            open_ += [child for child, _ in nexts[node] if child is not None and child is not apart]
            if not known[node] & _ANCHOR:
                open_ += self._meet(node)

    def _meet(self, node: Node) -> list[Node]:
        """This backward comes here: what is it to take besides, since sums of gradients are formed at once?"""
        reaches, taken, open_ = self._reaches, list[Node](), [node]
        while open_:
            node = open_.pop()
            if node not in reaches:
                reaches.add(node)
                open_ += self._above.get(node, ())
                for product in self._products.get(node, ()):
                    if product in self.now and self._edges.pop(product, None) is not None:
                        taken.append(node)
        return taken

    def leaves(self) -> list[torch.Tensor]:
        """Those of this backward; after `groups`."""
        return [node.variable for node in self._leaves if node in self.now]  # type: ignore[attr-defined]

    def groups(self) -> list[_Group]:
        """What is put off, from below; products whose gradients meet are together."""
        if self.refuses:
            return []
        while True:
            together = self._together()
            many = [
                node
                for nodes, below in together
                if len(nodes) > _MOST or self._reorders(nodes, below)
                for node in nodes
            ]
            if not many:
                break
            self._keep([self._edges.pop(node).node for node in many])  # and there may be products in what they need
        groups = [
            _Group(below, {node: _Product.of(node, self._edges[node]) for node in nodes}) for nodes, below in together
        ]
        for group in groups:
            group.listen()
        return groups

    def _together(self) -> list[tuple[list[Node], set[Node]]]:
        """Products that may be put off and whose gradients meet, and what is below their edges."""
        owner, joined = dict[Node, int](), list[tuple[list[Node], set[Node]]]()
        for node, edge in self._edges.items():
            if node not in self.now:
                continue
            here, open_ = len(joined), [edge.node]
            joined.append(([node], set()))
            while open_:
                node_below = open_.pop()
                other = owner.get(node_below)
                if other is None:
                    owner[node_below] = here
                    joined[here][1].add(node_below)
                    open_ += [child for child, _ in self._nexts[node_below] if child is not None]
                elif other != here:
                    here = self._joined(joined, owner, here, other)
        return [group for group in joined if group[0]]

    def _reorders(self, nodes: list[Node], below: set[Node]) -> bool:
        """Whether sums would be formed in another order: all products give at once, and what is between them later."""
        direct = Counter(self._edges[node].node for node in nodes)
        between = {node: sum(above in below for above in self._above.get(node, ())) for node in direct}
        return any(between[node] and count + between[node] > 2 for node, count in direct.items())

    @staticmethod
    def _joined(joined: list[tuple[list[Node], set[Node]]], owner: dict[Node, int], first: int, second: int) -> int:
        """The place of the larger of two, which takes the smaller one in: a node changes places a few times at most."""
        less, more = sorted((first, second), key=lambda index: len(joined[index][1]))
        joined[more][0].extend(joined[less][0])
        joined[more][1].update(joined[less][1])
        owner.update(dict.fromkeys(joined[less][1], more))
        joined[less] = ([], set())
        return more

    @staticmethod
    def _right_factor(node: Node) -> GradientEdge | None:
        """The edge to the right factor of a product of two matrices whose left one can be kept."""
        place, left = _PRODUCTS.get(type(node).__name__, (0, ""))
        if not left or getattr(node, "_saved_alpha", 1) != 1 or len(node._saved_mat2_sym_strides) != 2:  # type: ignore[attr-defined]
            return None  # a sparse matrix has no strides
        child, number = node.next_functions[place]
        if child is None or getattr(node, f"_raw_saved_{left}").unpack_hook is not None:
            return None  # a hook may be there for one reading, as that of a block which is computed again
        factor = getattr(node, f"_saved_{left}")
        return GradientEdge(child, number) if factor.layout is torch.strided and factor.is_floating_point() else None
