"""The door that agents call at: one token, one call per host, for a minute; and how many hosts one launcher holds."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher import callback_server as doors
from deepspeed.launcher.callback_server import CallbackServer
from deepspeed.launcher.channel import MAGIC, Channel
from deepspeed.launcher.controller import Control
from deepspeed.launcher.event_loop import OWN_DESCRIPTORS, make_room
from deepspeed.launcher.host_state import HostState
from deepspeed.launcher.job import Job
from deepspeed.launcher.multinode_runner import ForkStarter


@pytest.fixture
def control() -> Iterator[Control]:
    user, ours = socket.socketpair()
    front = Channel(descriptor := ours.detach(), descriptor)
    made = Control(Job({"h0": [0], "h1": [0]}, ["true"], [], "/"), ForkStarter(), front)
    yield made
    made.loop.close()
    front.close()
    user.close()


def until(control: Control, true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        control.loop.turn(0.02)


def call(door: CallbackServer, words: str) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", door.port), 5)
    caller.sendall(words.encode())
    caller.setblocking(False)
    return caller


def closed(caller: socket.socket) -> bool:
    """Whether the other side has hung up without a word."""
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:  # words of ours were still unread
        return True
    except BlockingIOError:
        return False


def greeted(caller: socket.socket) -> bool:
    """Whether the other side has said where to import from."""
    try:
        return caller.recv(1) == b"["
    except BlockingIOError:
        return False


def test_who_does_not_know_the_token_is_sent_away(control: Control) -> None:
    door = CallbackServer(control, control.peers)
    for words in ("guess\n", "x" * 300, door.token[:-1] + "\n"):
        with call(door, words) as caller:
            until(control, lambda caller=caller: closed(caller))
    with call(door, f"{door.token}\n") as agent:  # the token is good still
        until(control, lambda: greeted(agent))
        agent.sendall(MAGIC)
        door.close()


def test_who_says_nothing_is_sent_away(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "CALLER_SECONDS", 0.1)
    door = CallbackServer(control, control.peers)
    with call(door, "") as caller:
        until(control, lambda: closed(caller))
    door.close()


def test_one_call_more_than_there_are_hosts_ends_the_job(control: Control) -> None:
    door = CallbackServer(control, control.peers)
    with call(door, f"{door.token}\n") as first, call(door, f"{door.token}\n") as second:
        until(control, lambda: greeted(first))
        until(control, lambda: greeted(second))
        with call(door, f"{door.token}\n") as spy:
            with pytest.raises(LaunchError, match="used twice: somebody else has seen it"):
                control.wait(lambda: False)
            assert closed(spy)
    door.close()


def test_the_token_is_void_after_a_minute(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doors.OPEN_SECONDS == 60
    monkeypatch.setattr(doors, "OPEN_SECONDS", 0.1)
    door = CallbackServer(control, control.peers)
    end = time.monotonic() + 0.3
    until(control, lambda: time.monotonic() > end)
    with pytest.raises(ConnectionRefusedError):
        call(door, f"{door.token}\n")


@pytest.mark.parametrize(
    ("hello", "name"),
    [
        ({"node_name": "n2"}, "n2"),  # of the scheduler
        ({"host": "n3.cluster.example"}, "me@n3"),
        ({"address": "127.0.0.1"}, "localhost"),
        ({"index": "1"}, "n2"),
        ({}, None),
    ],
)
def test_which_host_an_agent_is_on(hello: dict[str, str], name: str | None) -> None:
    peers = [HostState("localhost", [0]), HostState("n2", [0]), HostState("me@n3", [0])]
    found = CallbackServer.identify({"host": "x", "node_name": "", "address": "192.0.2.7", "index": "", **hello}, peers)
    assert (found and found.name) == name


def test_room_for_many_hosts() -> None:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        make_room(soft - OWN_DESCRIPTORS)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 100, hard))
        make_room(soft - OWN_DESCRIPTORS)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(LaunchError, match=f"and {hard} are allowed: raise the hard limit"):
                make_room(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
