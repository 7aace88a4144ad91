"""Images of a request: data URLs, and downloads from the hosts of `--allow-remote-media`. A client names no file.

Downloads come from no other hosts, no internal addresses, and follow no redirects. The address that was checked is the one that
is connected to, so a name that resolves differently a moment later has no effect.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import httpx
from PIL import Image

from sage.inputs.media import decode_data_url, open_image
from sage.inputs.video import no_size_warning
from sage.serving.settings import ServerLimits

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # of PIL; others run external programs or rarely used decoders
DOWNLOADS_S = 10.0  # seconds of all downloads of a request
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class RemoteMedia:
    """Downloads from `hosts`, names in lower case; none by default."""

    hosts: Collection[str] = ()
    max_bytes: int = 0

    def fetch(self, url: str, deadline: float) -> bytes:
        """Returns the file at a URL; ValueError if it is not allowed, or not there by `deadline` (`time.monotonic`)."""
        parsed = self._checked(url)
        port = PORTS[parsed.scheme]
        pinned = parsed.copy_with(host=public_address(parsed.host, port), port=port)
        try:
            return asyncio.run(self._downloaded(pinned, parsed.host, deadline - time.monotonic()))
        except (httpx.HTTPError, OSError) as error:
            raise ValueError(f"{parsed.host}: cannot be downloaded ({type(error).__name__})") from error

    async def _downloaded(self, pinned: httpx.URL, host: str, seconds: float) -> bytes:
        headers, extensions, data = {"host": host, "accept-encoding": "identity"}, {"sni_hostname": host}, bytearray()
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(timeout=None, trust_env=False) as client,
            client.stream("GET", pinned, headers=headers, extensions=extensions) as response,
        ):
            if response.status_code != httpx.codes.OK:
                note = "; redirects are not followed" if response.is_redirect else ""
                raise ValueError(f"its server answers {response.status_code}{note}")
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > self.max_bytes:
                    raise ValueError(f"more than {self.max_bytes} bytes")
        return bytes(data)

    def _checked(self, url: str) -> httpx.URL:
        try:
            parsed = httpx.URL(url if url.isascii() and url.isprintable() and " " not in url else "\n")
        except httpx.InvalidURL as error:
            raise ValueError("not a URL") from error
        if parsed.scheme not in PORTS or not parsed.host:
            raise ValueError("give a data URL, data:image/png;base64,...")
        if parsed.userinfo:
            raise ValueError("the URL contains a user; remove it")
        if parsed.host not in self.hosts:
            raise ValueError(f"{parsed.host}: not a host that this server downloads from; give a data URL")
        if parsed.port not in (None, PORTS[parsed.scheme]):
            raise ValueError(f"{parsed.host}: port {parsed.port}, allowed: that of the scheme")
        return parsed


def public_address(host: str, port: int) -> str:
    """Returns an address of a host; ValueError if it has none, or one that is not on the public internet."""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host}: unknown host") from error
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


class MediaReader:
    """Opens the images of one request within the limits."""

    def __init__(self, limits: ServerLimits, remote: RemoteMedia) -> None:
        self._limits, self._remote = limits, remote
        self._num_left, self._pixels_left = limits.max_images, limits.max_pixels
        self._deadline = time.monotonic() + DOWNLOADS_S

    def open(self, url: Any) -> Image.Image:
        """Returns the image at a URL; ValueError if it cannot be read or exceeds a limit."""
        if not isinstance(url, str):
            raise ValueError("image: give a data URL, data:image/png;base64,...")
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"more images and frames than allowed: at most {self._limits.max_images}")
        try:
            is_data = url[:5].lower() == "data:"
            return self._decoded(decode_data_url(url) if is_data else self._remote.fetch(url, self._deadline))
        except ValueError as error:
            raise ValueError(f"image: {str(error).removeprefix('image ')}") from error

    def _decoded(self, data: bytes) -> Image.Image:
        limit = f"allowed in a request: {self._limits.max_pixels}"
        try:
            with no_size_warning(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
                self._pixels_left -= image.width * image.height
                if self._pixels_left < 0:
                    raise ValueError(f"{image.width}x{image.height} pixels, {limit}")
                return open_image(image)
        except ValueError:
            raise
        except Image.DecompressionBombError as error:
            raise ValueError(f"too many pixels, {limit}") from error
        except Exception as error:  # whatever PIL's decoders raise on corrupt bytes is the client's mistake
            raise ValueError(f"not an image in one of the formats {', '.join(FORMATS)}") from error
