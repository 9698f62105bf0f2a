"""Which hosts and device slots a run uses: the hostfile, narrowed by --include or --exclude."""

from __future__ import annotations

import re
from pathlib import Path

from deepspeed.errors import LaunchError

Hosts = dict[str, list[int]]
"""Host name to the indices of its device slots, in the order of the ranks."""

_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


def read_hostfile(path: str | Path) -> Hosts:
    """Read lines of the form `name slots=N`; `#` starts a comment.

    Returns:
        The hosts in the order of the file.

    Raises:
        LaunchError: a line has another form, a host is named twice, or there is none.
    """
    hosts: Hosts = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise LaunchError(f"{path}:{number}: {text!r} is not of the form 'hostname slots=N'")
        name, slots = match.groups()
        if name in hosts:
            raise LaunchError(f"{path}:{number}: host {name!r} is named twice; give it one line with all its slots")
        hosts[name] = list(range(int(slots)))
    if not hosts:
        raise LaunchError(f"{path} names no host; add lines of the form 'hostname slots=N', or leave the file out")
    return hosts


def select(pool: Hosts, include: str = "", exclude: str = "") -> Hosts:
    """Narrow `pool` to what `include` names, or to what `exclude` leaves.

    Args:
        pool: every host and slot there is.
        include: `host1@host2:0,2`: host1 with all its slots and two slots of host2.
        exclude: the same form.

    Raises:
        LaunchError: both are given, a host or slot is not in the pool, or nothing is left.
    """
    if include and exclude:
        raise LaunchError(f"--include {include!r} and --exclude {exclude!r} exclude each other; give one of them")
    if include:
        named = _parse_selection("--include", include, pool)
        chosen = {host: named.get(host, []) for host in pool}
    else:
        named = _parse_selection("--exclude", exclude, pool)
        chosen = {host: [slot for slot in slots if slot not in named.get(host, [])] for host, slots in pool.items()}
    hosts = {host: slots for host, slots in chosen.items() if slots}
    if not hosts:
        raise LaunchError(f"--include {include!r} --exclude {exclude!r} leave no slot of {_shown(pool)}")
    return hosts


def _parse_selection(flag: str, text: str, pool: Hosts) -> Hosts:
    selection: Hosts = {}
    for part in filter(None, text.split("@")):
        host, colon, listed = part.partition(":")
        if host not in pool:
            raise LaunchError(f"{flag} {text!r}: there is no host {host!r}; there is {_shown(pool)}")
        slots = [int(slot) for slot in listed.split(",") if slot.strip().isdigit()] if colon else pool[host]
        if colon and (len(slots) != len(listed.split(",")) or not set(slots) <= set(pool[host])):
            raise LaunchError(f"{flag} {text!r}: {host!r} has no slots {listed!r}; there is {_shown(pool)}")
        selection[host] = sorted({*selection.get(host, []), *slots})
    return selection


def _shown(pool: Hosts) -> str:
    return ", ".join(f"{host}:{','.join(map(str, slots))}" for host, slots in pool.items())
