"""Where the page is reached: a free port, and whether a browser can open it."""

import errno
import os
import socket
import sys
from ipaddress import ip_address

FIRST_PORT = 7860
_NUM_PORTS = 100
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def find_port(host: str, port: int | None) -> int:
    """A port that is free now.

    Raises:
        ValueError: the port is taken, all ports that are tried are, or the host is not an address of this machine.
    """
    if port is not None:
        found = _bind(host, port)
        if found is None:
            raise ValueError(
                f"port {port} is taken on {host}; give another one, or --port 0 for any free one."
            )
        return found
    for candidate in range(FIRST_PORT, FIRST_PORT + _NUM_PORTS):
        if _bind(host, candidate) is not None:
            return candidate
    last = FIRST_PORT + _NUM_PORTS - 1
    raise ValueError(f"ports {FIRST_PORT} to {last} are taken on {host}; --port 0 takes any free one.")


def _bind(host: str, port: int) -> int | None:
    """The port, or for 0 a free one; None where it is taken."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise ValueError(f"{host}:{port} is not an address of this machine ({error}).") from error
    with socket.socket(family, kind) as listener:
        # On Windows it would let a port be taken twice.
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except PermissionError as error:
            raise ValueError(
                f"port {port} needs the rights of an administrator; give one above 1023."
            ) from error
        except OSError as error:
            if error.errno in _NOT_HERE:
                raise ValueError(
                    f"{host} is not an address of this machine; the default is 127.0.0.1."
                ) from error
            return None
        return listener.getsockname()[1]


def url_of(host: str, port: int) -> str:
    """The page's address for a browser on this machine."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    return ip_address(socket.getaddrinfo(host, None)[0][4][0]).is_loopback


def has_display() -> bool:
    """Whether a browser with windows can open here; without a display a text browser would block the terminal."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
