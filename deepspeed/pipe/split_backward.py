"""Split of a backward pass: input gradients first, weight gradients of matrix products later.

[Note: what is put off] The autograd graph of a micro-batch is analysed before its backward. A product `x @ w` is
deferred if `w` depends on parameters only, which have no other uses in the graph. Backward skips the edge to `w`, so
autograd does not compute the weight gradient; `x` and the product's output gradient are kept. `weights` later
multiplies them as autograd would and continues along the same edge, so casts, transpositions and parameter hooks run
as usual, once. The model needs no change. All other gradients are computed immediately: biases, norms, embeddings, a
weight with other or very many uses, products of three dims, recomputed blocks (their saved tensors can be read only
once; with torch's older checkpoint, the whole part), compiled pieces, and all products of a part without input
gradient, because no stage waits for one.
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
# By the name of the autograd node: index of the edge to the right factor, and the attribute of the left factor.
_PRODUCTS = {"MmBackward0": (1, "self"), "AddmmBackward0": (2, "mat1")}
_REENTRANT = "CheckpointFunctionBackward"  # reentrant checkpoint: it refuses a partial backward
_ACCUMULATES = "AccumulateGrad"
_KINDS = {*_PRODUCTS, _REENTRANT, _ACCUMULATES}
_ANCHOR, _LEAF = 1, 2  # flags of a node: leads to the anchor, leads to a leaf
_MOST = 4  # maximum deferred products with a common gradient sum, because they are computed together


@dataclass
class _Product:
    """Product with a deferred gradient of its right factor.

    Args:
        edge: graph edge to the right factor.
        left: the left factor, without its graph.
        transposed: whether the right factor is stored by columns: autograd then multiplies in the other order.
        gradient: gradient of the product, once backward has reached it.
        versions: versions of `left` and `gradient` at that time.
    """

    edge: GradientEdge
    left: torch.Tensor
    transposed: bool
    gradient: torch.Tensor | None = None
    versions: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, node: Node, edge: GradientEdge) -> _Product:
        """Create a product from its node in the graph and the edge to its right factor."""
        left = getattr(node, f"_saved_{_PRODUCTS[type(node).__name__][1]}").detach()
        rows, strides = node._saved_mat2_sym_sizes[0], node._saved_mat2_sym_strides  # type: ignore[attr-defined]
        return cls(edge, left, strides[0] == 1 and strides[1] == rows)

    def multiplied(self) -> torch.Tensor:
        """Return the gradient of the right factor; PipelineError if a factor was changed in place meanwhile."""
        left, gradient = self.left, self.gradient
        if gradient is None or (left._version, gradient._version) != self.versions:
            raise PipelineError(
                f"the input {list(left.shape)} of a product with a weight, or its gradient, was changed in place "
                f'before the gradient of the weight was formed: take the schedule "1f1b", which forms it at once'
            )
        return gradient.t().mm(left).t() if self.transposed else left.t().mm(gradient)


@dataclass
class _Group:
    """Products with weight gradients that autograd sums in a common node; computed together, to keep the order of sums.

    Args:
        nodes: graph nodes below the edges of the products.
        products: all products, by their node.
        came: the products that backward has reached, in order.
    """

    nodes: set[Node]
    products: dict[Node, _Product]
    came: list[_Product] = field(default_factory=list)

    def listen(self) -> None:
        """Register hooks that run when backward reaches the products."""
        for node, product in self.products.items():
            node.register_prehook(lambda gradients, product=product: self._arrive(product, gradients[0]))
        self.products = {}  # a node holds its hooks, so hooks must not hold the node

    def _arrive(self, product: _Product, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # None: no gradient arrived
            product.gradient, product.versions = gradient, (product.left._version, gradient._version)
            self.came.append(product)

    def leaves(self) -> list[torch.Tensor]:
        """Return the parameters below the products."""
        return [node.variable for node in self.nodes if type(node).__name__ == _ACCUMULATES]  # type: ignore[attr-defined]

    def send(self) -> None:
        """Compute the deferred gradients and run backward below the products."""
        if self.came:
            torch.autograd.backward(
                [product.edge for product in self.came], [product.multiplied() for product in self.came]
            )


class SplitBackward:
    """Backward of a micro-batch through a part of the model, in two phases: `read` and `backward`, then `weights`.

    Args:
        anchor: leaf that all received tensors depend on; None: no stage waits for a gradient, so nothing is deferred.
    """

    def __init__(self, anchor: torch.Tensor | None) -> None:
        self._anchor = anchor
        self._groups: list[_Group] = []
        self._now: dict[int, torch.Tensor] = {}  # leaves of the immediate backward, by id
        self._later: set[int] = set()
        self._hides = anchor is None  # unknown which leaves get a gradient now

    @property
    def kept(self) -> int:
        """Number of bytes of the factors that are kept for deferred weight gradients."""
        pairs = [(product.left, product.gradient) for group in self._groups for product in group.came]
        return sum(t.nbytes for pair in pairs for t in pair if t is not None)

    def read(self, roots: Roots) -> None:
        """Analyse the graph below the roots, and choose the products to defer."""
        if self._anchor is None:
            return
        nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        graph = _Graph([node for node in nodes if node is not None], self._anchor)
        self._groups = graph.groups()
        self._now = {id(leaf): leaf for leaf in graph.leaves()}
        self._later = {id(leaf) for group in self._groups for leaf in group.leaves()}
        self._hides = graph.refuses  # recomputed parts have their own graph, with their own leaves

    def overtakes(self, earlier: SplitBackward) -> bool:
        """Return whether this backward may compute gradients that an earlier one has deferred; call after `read`."""
        return self._hides or not earlier._later.isdisjoint(self._now)

    def backward(self, roots: Roots, gradients: Gradients = None) -> None:
        """Run backward without the deferred products, after `read`; without gradients the root is a loss."""
        now, self._now = list(self._now.values()), {}
        torch.autograd.backward(roots, gradients, inputs=now if self._groups else None)

    def weights(self) -> None:
        """Compute the deferred gradients; a second call does nothing."""
        self._later.clear()
        while self._groups:
            self._groups.pop().send()  # last layers first; each product is freed


class _Graph:
    """Autograd graph of a micro-batch, from its roots to the leaves; nodes that lead to `anchor` are never deferred."""

    def __init__(self, roots: list[Node], anchor: torch.Tensor) -> None:
        self._nexts: dict[Node, Any] = {}  # edges of each node: (node or None, number)
        self._found: dict[Node, int] = {}  # flags of what is below a node
        self._above: dict[Node, list[Node]] = {}  # nodes above a node, outside of paths to the anchor
        self._edges: dict[Node, GradientEdge] = {}  # edges of products that may be deferred
        self._products: dict[Node, list[Node]] = {}  # products by the node of their edge
        self._leaves: list[Node] = []
        self.refuses = False
        for root in roots:
            self._read(root, anchor)
        for node, below in self._found.items():
            if not below & _ANCHOR:
                for child, _ in self._nexts[node]:
                    self._above.setdefault(child, []).append(node)
        self.now: set[Node] = set()
        self._reaches: set[Node] = set()  # nodes in `_above` with an immediate use below
        self._keep(roots)

    def _read(self, root: Node, anchor: torch.Tensor) -> None:
        """Visit all nodes below a root, children first; this runs for every micro-batch, so it has to be fast."""
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
        """Classify a node: a leaf, or a product with known factors."""
        if kind == _ACCUMULATES:
            self._leaves.append(node)
            self._found[node] = _ANCHOR | _LEAF if node.variable is anchor else _LEAF  # type: ignore[attr-defined]
        elif kind == _REENTRANT:
            self.refuses = True
        elif (edge := self._right_factor(node)) is not None and not self._found[edge.node] & _ANCHOR:
            others = [child for child, _ in self._nexts[node] if child is not None]
            others.remove(edge.node)
            # The right factor must not be a left factor too, and autograd must visit the node for another leaf.
            if edge.node not in others and any(self._found[child] & _LEAF for child in others):
                self._edges[node] = edge
                self._products.setdefault(edge.node, []).append(node)

    def _keep(self, nodes: list[Node]) -> None:
        """Add nodes and their descendants to the immediate backward, but not right factors of deferred products.

        If the immediate backward reaches a right factor, its product cannot be deferred and is added too (`_meet`).
        """
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
        """Stop deferring products with a right factor at or above an immediate node; return these factors."""
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
        """Return the leaves of the immediate backward; call after `groups`."""
        return [node.variable for node in self._leaves if node in self.now]  # type: ignore[attr-defined]

    def groups(self) -> list[_Group]:
        """Register hooks for the deferred products; return their groups, the lowest in the graph first."""
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
            self._keep([self._edges.pop(node).node for node in many])  # whose inputs may contain further products
        groups = [
            _Group(below, {node: _Product.of(node, self._edges[node]) for node in nodes}) for nodes, below in together
        ]
        for group in groups:
            group.listen()
        return groups

    def _together(self) -> list[tuple[list[Node], set[Node]]]:
        """Group the deferrable products with common nodes below their edges; return (products, nodes below)."""
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
        """Return whether deferring would change the order of gradient sums between the products."""
        direct = Counter(self._edges[node].node for node in nodes)
        between = {node: sum(above in below for above in self._above.get(node, ())) for node in direct}
        return any(between[node] and count + between[node] > 2 for node, count in direct.items())

    @staticmethod
    def _joined(joined: list[tuple[list[Node], set[Node]]], owner: dict[Node, int], first: int, second: int) -> int:
        """Merge the smaller of two groups into the larger (few moves per node); return the larger's index."""
        less, more = sorted((first, second), key=lambda index: len(joined[index][1]))
        joined[more][0].extend(joined[less][0])
        joined[more][1].update(joined[less][1])
        owner.update(dict.fromkeys(joined[less][1], more))
        joined[less] = ([], set())
        return more

    @staticmethod
    def _right_factor(node: Node) -> GradientEdge | None:
        """Return the edge to the right factor of a matrix product, if its left factor can be kept; else None."""
        place, left = _PRODUCTS.get(type(node).__name__, (0, ""))
        if not left or getattr(node, "_saved_alpha", 1) != 1 or len(node._saved_mat2_sym_strides) != 2:  # type: ignore[attr-defined]
            return None  # sparse matrices have no strides
        child, number = node.next_functions[place]
        if child is None or getattr(node, f"_raw_saved_{left}").unpack_hook is not None:
            return None  # a saved-tensor hook may allow only one read, as for recomputed blocks
        factor = getattr(node, f"_saved_{left}")
        return GradientEdge(child, number) if factor.layout is torch.strided and factor.is_floating_point() else None
