"""Nodes of one job that meet without ssh."""

from __future__ import annotations

import signal
import socket

import pytest

from deepspeed.launcher import node_rendezvous
from deepspeed.launcher.channel import Channel
from deepspeed.launcher.job import Job


def channels() -> tuple[Channel, Channel]:
    """Both ends of a connection."""
    one, other = (end.detach() for end in socket.socketpair())
    return Channel(one, one), Channel(other, other)


def test_a_node_that_waits_for_the_first_one_is_stopped_by_a_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_rendezvous, "ARRIVE_SECONDS", 3.0)
    user, front = channels()
    user.send("signal", number=int(signal.SIGINT))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        job = Job({"h0": [0], "h1": [0]}, [], [], "/", address="127.0.0.1", port=port - 1)
        assert node_rendezvous.run(job, 1, "", front) == 2
    assert capsys.readouterr().err == "deepspeed: stopped by SIGINT before any rank was started\n"
    user.close()
    front.close()
