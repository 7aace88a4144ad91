"""Downloads images from the hosts of `--allow-remote-media`: no other hosts, no internal addresses, no redirects.

The address that was checked is the one that is connected to, so a name that resolves differently a moment later has no effect.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

TIMEOUT_S = 10.0  # of a connection, of a wait for data, and of all data
PORTS = {"http": 80, "https": 443}
CHUNK = 1 << 16


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to a given address instead of resolving the host again."""

    def __init__(self, host: str, port: int, address: str, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=TIMEOUT_S)
        self._address, self._context = address, context

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), self.timeout)
        self.sock = plain if self._context is None else self._context.wrap_socket(plain, server_hostname=self.host)


@dataclass(frozen=True)
class RemoteMedia:
    """Downloads from `hosts`, names in lower case; none by default."""

    hosts: Collection[str] = ()
    max_bytes: int = 0

    def fetch(self, url: str) -> bytes:
        """Returns the file at a URL; ValueError names the reason if it is not allowed or cannot be downloaded."""
        parts = self._checked(url)
        assert parts.hostname is not None
        port = parts.port or PORTS[parts.scheme]
        address = public_address(parts.hostname, port)
        context = ssl.create_default_context() if parts.scheme == "https" else None
        connection = _PinnedConnection(parts.hostname, port, address, context)
        try:
            connection.request("GET", f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}")
            return self._body(connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"{parts.hostname}: cannot be downloaded ({type(error).__name__})") from error
        finally:
            connection.close()

    def _checked(self, url: str) -> SplitResult:
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError("not a URL")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError("not a URL") from error
        if parts.scheme not in PORTS or not parts.hostname:
            raise ValueError("give a data URL, data:image/png;base64,...")
        if parts.username is not None or parts.password is not None:
            raise ValueError("the URL contains a user; remove it")
        if parts.hostname.lower() not in self.hosts:
            raise ValueError(f"{parts.hostname}: not a host that this server downloads from; give a data URL")
        if port not in (None, PORTS[parts.scheme]):
            raise ValueError(f"{parts.hostname}: port {port}, allowed: that of the scheme")
        return parts

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        if response.status != http.client.OK:
            note = "; redirects are not followed" if 300 <= response.status < 400 else ""
            raise ValueError(f"its server answers {response.status}{note}")
        data, deadline = bytearray(), time.monotonic() + TIMEOUT_S
        while chunk := response.read1(CHUNK):
            data += chunk
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(data) > self.max_bytes:
                raise ValueError(f"more than {self.max_bytes} bytes")
        return bytes(data)


def public_address(host: str, port: int) -> str:
    """Returns an address of a host; ValueError if it has none, or one that is not on the public internet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host}: unknown host") from error
    addresses = [str(info[4][0]) for info in found]
    if not addresses or not all(map(is_public, addresses)):
        raise ValueError(f"{host}: an internal address; give a data URL")
    return addresses[0]


def is_public(address: str) -> bool:
    """Returns whether an IP address is on the public internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    embedded = None
    if isinstance(parsed, ipaddress.IPv6Address):
        embedded = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
    return parsed.is_global and not parsed.is_multicast and (embedded is None or is_public(str(embedded)))
