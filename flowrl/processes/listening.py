"""The address that one of flowrl's servers listens on."""

import socket

from flowrl.errors import UserError


def bound_socket(command: str, host: str, port: int) -> socket.socket:
    """A socket that is bound to an address; port 0 is any free one. UserError, in place of a
    server's traceback, if the address cannot be listened on."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        raise UserError(
            f"{command}: cannot listen on {host}:{port} ({error.strerror}): set another --port or "
            "--host"
        ) from error
    return bound
