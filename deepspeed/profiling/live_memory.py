"""Bytes of live tensors over time: every storage once, from its first use by an operator until its last view is freed.

[Note: live bytes] The resident memory of a process is larger: because of freed blocks that the C library caches it was
1.2 to 1.9 times as large in measurements. Storages are recorded when operators read or return their tensors;
buffers that an operator allocates and frees internally are not recorded.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.foundation.pytree import tensors_in
from deepspeed.ops.dispatch import DispatchMode


class LiveMemory(DispatchMode):
    """Context that counts the bytes of live tensors.

    Args:
        category: returns the category of a storage, given the innermost Python frame of its first use.
        foreign: returns whether a storage is another process's memory, which is not counted here.

    Attributes:
        total: live bytes now.
        peak: maximum of live bytes.
    """

    def __init__(
        self,
        category: Callable[[Any], str] = lambda _frame: "",
        foreign: Callable[[torch.UntypedStorage], bool] = lambda _storage: False,
    ) -> None:
        super().__init__()
        self._category, self._foreign = category, foreign
        self._alive: dict[int, tuple[Any, int]] = {}  # by storage address: weak reference with callback, number
        self._bytes: dict[int, int] = {}  # by number
        self._made_as: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []  # number of the storage, change of its bytes
        self._next = self._first = 0
        self.total = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs, out)):
            self.see(tensor)
        return out

    def see(self, tensor: torch.Tensor) -> int:
        """Count a tensor's storage from now on; returns its number, or -1 for foreign, sparse and meta tensors."""
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return -1
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is None:
            number = -1 if self._foreign(storage) else self._next
            self._next += number >= 0
            gone = functools.partial(_gone, weakref.ref(self), storage._cdata, number)
            self._alive[storage._cdata] = (weakref.ref(storage, gone), number)
            if number >= 0:
                self._made_as[number] = self._category(sys._getframe(1))
                self._bytes[number] = 0
        else:
            number = known[1]
        if number >= 0 and storage.nbytes() != self._bytes[number]:
            self._resized(number, storage.nbytes())
        return number

    def _resized(self, number: int, nbytes: int) -> None:
        grown = nbytes - self._bytes[number]
        self._bytes[number] = nbytes
        self._events.append((number, grown))
        self.total += grown
        self.peak = max(self.peak, self.total)

    def _ended(self, key: int, number: int) -> None:
        self._alive.pop(key, None)
        if number >= 0:
            self._resized(number, 0)

    def __enter__(self) -> Any:
        self._plain_resize = torch.UntypedStorage.resize_
        plain, this = self._plain_resize, weakref.ref(self)

        def resize_(storage: torch.UntypedStorage, *size: Any) -> Any:
            resized = plain(storage, *size)
            live = this()
            known = None if live is None else live._alive.get(storage._cdata)
            if live is not None and known is not None and known[1] >= 0:
                live._resized(known[1], storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]  # no operator: nothing else is told of it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign]

    def mark(self, kinds: Iterable[tuple[str, Iterable[torch.Tensor | None]]]) -> None:
        """Set the category of tensors, also retroactively, in place of the one that `category` returned.

        Args:
            kinds: (category, tensors); a storage gets the category of the first entry that contains it.
        """
        categories: dict[int, str] = {}
        for category, tensors in kinds:
            for tensor in tensors:
                number = -1 if tensor is None else self.see(tensor)
                if number >= 0:
                    categories.setdefault(number, category)
        self._made_as.update(categories)

    def restart_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self._first, self.peak = len(self._events), self.total

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by category at the peak (since `restart_peak`)."""
        most, when, total = -1, 0, 0
        for index, (_, grown) in enumerate(self._events):
            total += grown
            if index + 1 >= self._first and total > most:
                most, when = total, index + 1
        return self._by_category(self._events[:when])

    def now(self) -> dict[str, int]:
        return self._by_category(self._events)

    def _by_category(self, events: list[tuple[int, int]]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for number, grown in events:
            totals[self._made_as[number]] += grown
        return {category: count for category, count in sorted(totals.items()) if count}


def _gone(live: weakref.ref[LiveMemory], key: int, number: int, _reference: Any) -> None:
    this = live()
    if this is not None:
        this._ended(key, number)
