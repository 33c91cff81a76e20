"""The sockets of the server: bound before a model is loaded, so that a taken port is found in a moment."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_BACKLOG = 2048


class PortError(ValueError):
    """The server cannot listen at the address asked for."""


@contextmanager
def bound_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """One bound socket for each address of ``host``, closed at the end; they do not listen yet.

    Raises:
        PortError: the port is in use, the host has no address here, or the system refuses it.
    """
    with ExitStack() as held:
        # Only what binds belongs in here: errors of the block are not about the port.
        sockets = _bind(host, port, held)
        yield sockets


def listen(sockets: list[socket.socket]) -> None:
    """Let clients connect (mutates ``sockets``); before that they are refused at once.

    Raises:
        PortError: another process has begun to listen on the port meanwhile: two may bind one that nobody listens on.
    """
    for sock in sockets:
        host, port = sock.getsockname()[:2]
        try:
            sock.listen(_BACKLOG)
        except OSError as error:
            raise _port_error(host, port, error) from error


def _bind(host: str, port: int, held: ExitStack) -> list[socket.socket]:
    sockets, failure = [], None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortError(f"--host {host} has no address: {error.strerror}") from error
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sock = held.enter_context(socket.socket(family, kind, protocol))
            # A port whose last connections are still winding down is free.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # "::" would take the port of IPv4 as well, which has its own socket where it was asked for.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
        except OSError as error:
            # localhost names ::1 also where IPv6 is off; one address is enough.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise _port_error(host, port, error) from error
            failure = error
        else:
            sockets.append(sock)
    if not sockets:
        raise _port_error(host, port, failure) from failure
    return sockets


def _port_error(host: str, port: int, error: OSError) -> PortError:
    if error.errno == errno.EADDRINUSE:
        return PortError(f"port {port} is in use; choose another with --port")
    return PortError(f"cannot listen at {host}, port {port}: {error.strerror}; choose another --host or --port")
