"""Dense gradients that were handed out: what users change in them in place is taken over before more is added."""

from __future__ import annotations

import weakref

import torch

from deepspeed.zero.member import Member


class HandedOut:
    """The gradients of a window that users have been given as copies."""

    def __init__(self) -> None:
        self._out: list[tuple[Member, torch.Tensor, int]] = []  # the tensor, and its version then
        self._late: list[tuple[str, weakref.ref[torch.Tensor], int]] = []  # more gradients have been added since
        self.edits = 0  # changes taken over in the window

    def __bool__(self) -> bool:
        return bool(self._out)

    def add(self, member: Member, tensor: torch.Tensor) -> None:
        """`tensor` is given away."""
        self._out.append((member, tensor, tensor._version))

    def take_edited(self) -> list[tuple[Member, torch.Tensor]]:
        """What has been changed since it was given away, or since the last call."""
        edited = [(member, tensor) for member, tensor, version in self._out if tensor._version != version]
        if edited:
            self._out = [(member, tensor, tensor._version) for member, tensor, _ in self._out]
            self.edits += len(edited)
        return edited

    def close(self) -> None:
        """More gradients are added: a change of what was given away comes too late from now on."""
        self._late += [(member.name, weakref.ref(tensor), tensor._version) for member, tensor, _ in self._out]
        self._out.clear()

    def late(self) -> list[str]:
        """Parameters whose handed-out gradient was changed too late."""
        found = ((name, tensor(), version) for name, tensor, version in self._late)
        return [name for name, tensor, version in found if tensor is not None and tensor._version != version]

    def forget(self, member: Member) -> None:
        """The gradient of `member` is replaced: what was given away is nobody's gradient any more."""
        self._out = [entry for entry in self._out if entry[0] is not member]

    def clear(self) -> None:
        """The window is over."""
        self._out.clear()
        self._late.clear()
        self.edits = 0
