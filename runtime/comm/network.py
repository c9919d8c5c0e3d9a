"""Which address of this machine peers are told. Numeric throughout: host names often resolve to another network."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from typing import Final

from runtime.errors import ConfigError

SOCKET_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where gloo and NCCL look for the interface to use. Unset, they pick one by host name, which on many clusters is
another network's."""

_SIOCGIFADDR: Final = 0x8915
_NAME_BYTES: Final = 15
_DISCARD_PORT: Final = 9


def address_of(interface: str) -> str:
    """Numeric IPv4 address of a network interface; of loopback where none is named.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    if not interface:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:_NAME_BYTES]))
        except OSError as e:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                "fabric_interface", f"{interface!r} gives no IPv4 address: {e.strerror}", f"choose one of: {there}"
            ) from e
    return socket.inet_ntoa(answer[20:24])


def fabric_interface(named: str, own: str, others: Sequence[str]) -> str:
    """Name of the network interface whose address peers are told.

    Args:
        named: the site's choice; empty: found out.
        own: this node's name.
        others: names of the other nodes; none: loopback will do.

    Raises:
        ConfigError: the other nodes cannot be looked up, or only loopback leads to them.
    """
    if named or not others:
        return named or "lo"
    try:
        address = address_towards(others[0])
    except OSError as e:
        fix = "name the interface in the site file, as in fabric_interface: hsn0"
        raise ConfigError("fabric_interface", f"{own} cannot look up node {others[0]}: {e}", fix) from e
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address and not address.startswith("127."):
                return name
        except ConfigError:  # an interface without an address
            continue
    found = ", ".join(name for _, name in socket.if_nameindex())
    raise ConfigError("fabric_interface", f"{own} reaches {others[0]} from {address} only", f"name one of: {found}")


def address_towards(host: str) -> str:
    """The address that this machine's routes give packets to a host; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, _DISCARD_PORT))
        return s.getsockname()[0]
