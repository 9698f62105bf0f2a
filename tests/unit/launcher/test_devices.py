"""Which devices the ranks see, on a machine with a planted number of them."""

from __future__ import annotations

import base64
import json
import os

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher import hosts as devices
from deepspeed.launcher import launch
from deepspeed.launcher.environment import nodes_of, parse_cores
from deepspeed.launcher.hosts import device_variable


@pytest.fixture
def machine(monkeypatch):
    def plant(count, visible=None):
        monkeypatch.setattr(devices, "_installed", lambda: count)
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return plant


@pytest.mark.parametrize(
    ("count", "visible", "expected"),
    [
        (0, None, []),
        (0, "0,1", []),
        (2, None, ["0", "1"]),
        (8, "3,1", ["3", "1"]),
        (8, "", []),
        (8, "-1", []),
        (8, "2,-1,3", ["2"]),
        (2, "1,7,0", ["1"]),
        (2, "GPU-5ebe9fd8, MIG-6a3", ["GPU-5ebe9fd8", "MIG-6a3"]),
    ],
)
def test_visible_devices_are_taken_as_given(machine, count, visible, expected):
    machine(count, visible)
    assert devices.visible_devices() == expected


def test_the_cpu_can_be_asked_for(machine, monkeypatch):
    machine(4)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert devices.visible_devices() == []


def test_slots_count_within_the_visible_devices(machine):
    machine(8, "6,2,GPU-1")
    assert device_variable([0, 2], os.environ) == {"CUDA_VISIBLE_DEVICES": "6,GPU-1"}


def test_a_slot_beyond_the_visible_devices_is_refused(machine):
    machine(8, "6,2")
    with pytest.raises(LaunchError, match="shows 2: 6,2"):
        device_variable([0, 2], os.environ)


def test_ranks_are_counted_over_the_nodes():
    node = nodes_of({"a": [0, 1, 2], "b": [1, 3]})["b"]
    assert (node.first_rank, node.slots, node.world_size) == (3, [1, 3], 5)


def test_the_world_travels_as_json():
    hosts = {"a": [0, 1], "b": [2]}
    assert json.loads(base64.urlsafe_b64decode(launch.encode_world(hosts))) == hosts


@pytest.mark.parametrize(("text", "cores"), [("3", [3]), ("0-2,8", [0, 1, 2, 8])])
def test_core_lists(text, cores):
    assert parse_cores(text) == cores


def test_a_bad_core_list_is_refused():
    with pytest.raises(LaunchError, match="'x' is neither a core nor a range"):
        parse_cores("0-2,x")
