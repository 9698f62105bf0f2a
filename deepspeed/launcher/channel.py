"""Message channel between launcher and agents, over pipes or a socket; a message is a JSON object and raw bytes."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Iterator
from typing import Any

MAGIC = b"\n\0deepspeed agent 1\n"
"""Start of an agent's messages; earlier output of a login script is ignored."""
MOST_BYTES = 256 << 20
"""Maximum message size; a larger one means that the other side is no agent or launcher."""

_HEAD = struct.Struct("=II")  # bytes of the JSON, of what follows it
_READ = 1 << 18

Message = tuple[dict[str, Any], bytes]


class Channel:
    """One side of a connection. Writes never block: bytes that cannot be written yet are queued in memory.

    Args:
        reader: descriptor to read from; the channel makes both descriptors non-blocking, and `close` closes both.
        writer: descriptor to write to; may be the same one.
        magic: whether messages begin after the bytes `MAGIC`; the last 2,000 earlier bytes are kept in `preamble`.
    """

    def __init__(self, reader: int, writer: int, magic: bool = False) -> None:
        self.reader, self.writer = reader, writer
        self.received_at = time.monotonic()
        self.preamble = b""
        self.open = True
        self._waits_for_magic = magic
        self._incoming = bytearray()
        self._outgoing = bytearray()
        for descriptor in {reader, writer}:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)

    @property
    def waiting(self) -> int:
        """Number of queued bytes."""
        return len(self._outgoing)

    def send(self, kind: str, data: bytes = b"", /, **fields: Any) -> None:
        """Send a message, as far as possible without blocking; `flush` sends the rest.

        Args:
            kind: kind of the message, its JSON field `kind`.
            data: raw bytes after the JSON object.
            fields: other JSON fields.
        """
        text = json.dumps({"kind": kind, **fields}).encode()
        self._outgoing += _HEAD.pack(len(text), len(data)) + text + data
        self.flush()

    def send_line(self, text: str) -> None:
        """Send a line of text, which the start command of an agent reads; call this before `send`."""
        self._outgoing += text.encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as many queued bytes as possible; if the other side has closed the connection, drop them."""
        while self._outgoing and self.open:
            try:
                done = os.write(self.writer, self._outgoing[:_READ])
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()
                return
            del self._outgoing[:done]

    def receive(self) -> Iterator[Message]:
        """Yield the messages (JSON object, raw bytes) that have arrived, without blocking.

        Afterwards, `open` is False if the other side has closed the connection.

        Raises:
            ValueError: a message is too large or has no valid JSON.
        """
        for _ in range(64):  # a busy peer must not keep the others waiting
            try:
                data = os.read(self.reader, _READ)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.open = False
                break
            self.received_at = time.monotonic()
            self._incoming += data
            if len(self._incoming) > _READ * 8:
                yield from self._messages()
        yield from self._messages()

    def _messages(self) -> Iterator[Message]:
        if self._waits_for_magic:
            position = self._incoming.find(MAGIC)
            if position < 0:
                self.preamble = bytes(self._incoming[-2000:])
                return
            self.preamble = bytes(self._incoming[:position][-2000:])
            del self._incoming[: position + len(MAGIC)]
            self._waits_for_magic = False
        start = 0
        try:
            while len(self._incoming) - start >= _HEAD.size:
                text_size, data_size = _HEAD.unpack_from(self._incoming, start)
                if text_size + data_size > MOST_BYTES:
                    raise ValueError("the other side sends what is no message")
                end = start + _HEAD.size + text_size + data_size
                if len(self._incoming) < end:
                    return
                text = self._incoming[start + _HEAD.size : start + _HEAD.size + text_size]
                data = bytes(self._incoming[end - data_size : end])
                start = end
                yield json.loads(text.decode()), data
        finally:
            del self._incoming[:start]

    def close(self) -> None:
        self.open = False
        for descriptor in {self.reader, self.writer}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
