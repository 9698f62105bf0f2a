"""Server for connections from agents that pdsh, mpirun or srun has started."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

from deepspeed.launcher import agent
from deepspeed.launcher.channel import Channel
from deepspeed.launcher.host_state import HostState

if TYPE_CHECKING:
    from deepspeed.launcher.controller import Control

OPEN_SECONDS = 60.0
"""Time for which the token is valid."""
CALLER_SECONDS = 5.0
"""Time in which a connection must send the token."""
_LINE_BYTES = 256


class CallbackServer:
    """Listening socket for agents, which authenticate by a token.

    Args:
        control: controller that gets the connections.
        peers: hosts; the agent of each connects once.
    """

    def __init__(self, control: Control, peers: list[HostState]) -> None:
        self._control = control
        self._peers = peers
        self._socket = socket.create_server(("", 0), backlog=4096)
        self._socket.setblocking(False)
        self._callers: dict[int, tuple[socket.socket, bytes]] = {}
        self._calls = 0
        self.token = secrets.token_hex(16)
        self.port: int = self._socket.getsockname()[1]
        control.loop.watch(self._socket.fileno(), self._accept)
        control.loop.later(OPEN_SECONDS, self.close)

    def close(self) -> None:
        """Stop listening, and close connections that have not sent the token."""
        if self._socket.fileno() >= 0:
            self._control.loop.unwatch(self._socket.fileno())
            self._socket.close()
        for descriptor in list(self._callers):
            self._drop(descriptor)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            caller.setblocking(False)
            descriptor = caller.fileno()
            self._callers[descriptor] = (caller, b"")
            self._control.loop.watch(descriptor, lambda descriptor=descriptor: self._listen(descriptor))
            self._control.loop.later(CALLER_SECONDS, lambda caller=caller: self._drop_on_timeout(caller))

    def _drop_on_timeout(self, caller: socket.socket) -> None:
        """Close a connection that has not sent the token in time; its descriptor may belong to another one now."""
        for descriptor, (known, _) in list(self._callers.items()):
            if known is caller:
                self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        if descriptor in self._callers:
            self._control.loop.unwatch(descriptor)
            self._callers.pop(descriptor)[0].close()

    def _listen(self, descriptor: int) -> None:
        """Read a connection's token. A wrong token closes the connection; more right ones than hosts abort the job."""
        caller, heard = self._callers[descriptor]
        try:
            data = caller.recv(_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        heard += data
        token, newline, _ = heard.partition(b"\n")
        if not newline and data and len(heard) < _LINE_BYTES:
            self._callers[descriptor] = (caller, heard)
            return
        if not newline or not hmac.compare_digest(token, self.token.encode()):
            self._drop(descriptor)
            return
        self._control.loop.unwatch(descriptor)
        del self._callers[descriptor]
        self._calls += 1
        if self._calls > len(self._peers):
            caller.close()
            self._seen_twice()
            return
        own = caller.detach()
        os.set_blocking(own, False)
        channel = Channel(own, own, magic=True)
        channel.send_line(json.dumps(agent.import_path()))
        self._await_hello(channel)

    def _await_hello(self, channel: Channel) -> None:
        """Watch a channel for the agent's first message, which has its host name."""

        def hear() -> None:
            for message, _ in channel.receive():
                self._control.loop.unwatch(channel.reader)
                self._assign_host(channel, message)
                return
            if not channel.open:
                self._control.loop.unwatch(channel.reader)
                channel.close()

        self._control.loop.watch(channel.reader, hear)

    def _assign_host(self, channel: Channel, hello: dict[str, Any]) -> None:
        peer = self.identify(hello, self._peers)
        if peer is None:
            self._control.abort(
                f"an agent on {hello['host']} ({hello['address']}) called, and that is none of the hosts "
                f"{', '.join(peer.name for peer in self._peers)}"
            )
            channel.close()
        elif peer.channel is not None:
            channel.close()
            self._seen_twice()
        else:
            self._control.attach(peer, channel)
            self._control.on_hello(peer, hello)

    def _seen_twice(self) -> None:
        self._control.abort("the token of this job was used twice: somebody else has seen it, so the job ends")

    @staticmethod
    def identify(hello: dict[str, Any], peers: list[HostState]) -> HostState | None:
        """Return an agent's host, by host or node name, address or task number, or as the only host without an agent.

        Args:
            hello: first message of the agent.
            peers: hosts of the job.

        Returns:
            The host; None if the agent cannot be assigned to a host.
        """
        free = [peer for peer in peers if peer.channel is None]
        own = {hello["host"], hello["host"].split(".")[0], hello["node_name"], hello["address"]} - {""}
        for candidates in (free, peers):  # a second call of one host is told from the first of another
            for peer in candidates:
                name = peer.name.rpartition("@")[2]
                if name in own or name.split(".")[0] in own:
                    return peer
            for peer in candidates:
                if hello["address"] in agent.resolved(peer.name.rpartition("@")[2]):
                    return peer
        index = int(hello["index"]) if hello["index"].isdigit() else -1
        return peers[index] if 0 <= index < len(peers) else free[0] if len(free) == 1 else None
