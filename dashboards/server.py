"""Serving the pages: to this machine, or to others that come with the token of the link."""

import hmac
import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit

import flask
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from smeltscope.errors import SmeltscopeError

NAMES_OF_HERE = ("localhost", "127.0.0.1", "[::1]")


class _Quiet(WSGIRequestHandler):
    """No line for each request."""

    def log_request(self, *_: object) -> None:
        pass


def is_local(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; refused in a sentence where it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except (OSError, OverflowError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise SmeltscopeError(
            f"{host}:{port} cannot be listened on ({what}); choose another --port, or --port 0 for a free one."
        ) from error
    return listening


def guard(server: flask.Flask, *, port: int, token: str | None) -> None:
    """Check every request: its token, or where there is none that it was meant for this machine.

    A link with `?token=...` is answered with a cookie and the same address without the token. Without a token a page of
    another site, whose name was made to point here, is refused by the name that it asks for.
    """
    cookie = f"smeltscope_{port}"  # cookies are of a host, whatever the port

    @server.before_request
    def check() -> flask.typing.ResponseReturnValue | None:
        request = flask.request
        if token is None:
            asked = urlsplit(f"//{request.host}")
            if f"[{asked.hostname}]" in NAMES_OF_HERE or asked.hostname in NAMES_OF_HERE:
                return None
            return flask.Response("This page is for this machine only.", 403)
        given = request.args.get("token")
        if given is not None and _same(given, token):
            rest = [(k, v) for k, v in request.args.items(multi=True) if k != "token"]
            answer = flask.redirect(f"{request.path}{'?' * bool(rest)}{urlencode(rest)}")
            answer.set_cookie(cookie, token, httponly=True, samesite="Strict")
            return answer
        if _same(request.cookies.get(cookie, ""), token):
            return None
        return flask.Response("Open the link that probe view printed: it holds the token.", 403)


def make_quiet_server(
    application: Callable[..., object], listening: socket.socket
) -> BaseWSGIServer:
    """A server of several threads on a socket that listens."""
    host, port = listening.getsockname()[:2]
    return make_server(
        host,
        port,
        application,  # type: ignore[arg-type]
        threaded=True,
        request_handler=_Quiet,
        fd=listening.fileno(),
    )


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
