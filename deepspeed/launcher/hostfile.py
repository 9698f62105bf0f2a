"""Which hosts and device slots a run uses: the hostfile, narrowed by --include or --exclude."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger

Hosts = dict[str, list[int]]
"""Host name to the indices of its device slots, in the order of the ranks."""

MOST_HOSTS = 1 << 16
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")
_USER = r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?"
_NAME = re.compile(_USER + r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_RANGES = re.compile(r"\[([^\[\]]*)\]")


def check_name(name: str, where: str) -> str:
    """`name`, when it is nothing but the name or address of a host.

    Starters have a syntax of their own in host names (`exec:b`, `-b`, `^file`, `h[0-1]`), and ssh takes options there.

    Raises:
        LaunchError: it is anything else.
    """
    if _NAME.fullmatch(name):
        return name
    user, at, address = name.rpartition("@")
    try:
        ipaddress.IPv6Address(address)
        if not at or _NAME.fullmatch(f"{user}@x"):
            return name
    except ValueError:
        pass
    raise LaunchError(
        f"{where}: {name!r} is not the name of a host: letters, digits, dots and hyphens, "
        "with a user before an @ if need be; ranges stand in brackets, like gpu[01-16]"
    )


def expand(name: str, where: str) -> list[str]:
    """The hosts of a name with ranges: `h[01-03,7]` is h01, h02, h03 and h7.

    Raises:
        LaunchError: a range is malformed, or there are too many hosts.
    """
    names = [""]
    position = 0
    for match in _RANGES.finditer(name):
        parts = list(_numbers(match[1], name, where))
        if len(names) * len(parts) > MOST_HOSTS:
            raise LaunchError(f"{where}: {name!r} names more than {MOST_HOSTS} hosts")
        names = [before + name[position : match.start()] + part for before in names for part in parts]
        position = match.end()
    return [check_name(before + name[position:], where) for before in names]


def _numbers(text: str, name: str, where: str) -> Iterator[str]:
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or first > last or last - first >= MOST_HOSTS:
            raise LaunchError(f"{where}: {part!r} in {name!r} is not a range of numbers like 01-16")
        yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))


def read_hostfile(path: str | Path) -> Hosts:
    """Read lines of the form `name slots=N`; `#` starts a comment, and a name may hold ranges: `gpu[01-16]`.

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
        for name in expand(match[1], f"{path}:{number}"):
            if name in hosts:
                raise LaunchError(f"{path}:{number}: host {name!r} is named twice; give it one line with all its slots")
            hosts[name] = list(range(int(match[2])))
    if not hosts:
        raise LaunchError(f"{path} names no host; add lines of the form 'hostname slots=N', or leave the file out")
    return hosts


def fetch_hostfile(hostfile_path: str | Path) -> dict[str, int] | None:
    """How many slots each host of a hostfile has, in its order; None, with one line, where there is no such file.

    Raises:
        LaunchError: as `read_hostfile` does.
    """
    if not Path(hostfile_path).is_file():
        logger.info("there is no hostfile %s: this machine's own devices are used", hostfile_path)
        return None
    return {host: len(slots) for host, slots in read_hostfile(hostfile_path).items()}


def select(pool: Hosts, include: str = "", exclude: str = "") -> Hosts:
    """Narrow `pool` to what `include` names, or to what `exclude` leaves.

    Args:
        pool: every host and slot there is.
        include: `host1@host2:0,2-3`: host1 with all its slots and three slots of host2.
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
    for part in _parts(text, pool):
        head, colon, listed = (part, "", "") if part in pool else part.rpartition(":")
        name = head if colon else part
        for host in [name] if name in pool else expand(name, f"{flag} {text!r}"):
            if host not in pool:
                raise LaunchError(f"{flag} {text!r}: there is no host {host!r}; there is {_shown(pool)}")
            slots = _slots(listed) if colon else pool[host]
            if not slots or not set(slots) <= set(pool[host]):
                raise LaunchError(f"{flag} {text!r}: {host!r} has no slots {listed!r}; there is {_shown(pool)}")
            selection[host] = sorted({*selection.get(host, []), *slots})
    return selection


def _parts(text: str, pool: Hosts) -> list[str]:
    """The parts between the `@`, where that of a known `user@host` is none."""
    words = [word for word in text.split("@") if word]
    with_users = {name for name in pool if "@" in name}
    parts: list[str] = []
    while words:
        part = words.pop(0)
        joined = f"{part}@{words[0]}" if words else ""
        if joined in with_users or joined.rpartition(":")[0] in with_users:
            part = joined
            words.pop(0)
        parts.append(part)
    return parts


def _slots(listed: str) -> list[int]:
    """The slots of a list such as `0,2-5`; none when it is malformed."""
    slots: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            return []
        slots.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return slots


def _shown(pool: Hosts) -> str:
    shown = ", ".join(f"{host}:{','.join(map(str, slots))}" for host, slots in list(pool.items())[:16])
    return shown if len(pool) <= 16 else f"{shown} and {len(pool) - 16} more"


def is_this_machine(name: str) -> bool:
    """Whether `name`, without its user, is this machine: by name, or by an address that can be listened on here."""
    host = name.rpartition("@")[2]
    own = socket.gethostname()
    if host in ("localhost", own, own.split(".")[0]):
        return True
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, place in places:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(place)
                return True
            except OSError:
                continue
    return False
