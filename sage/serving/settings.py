"""Limits of the server, options of `sage-serve`. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sage.io.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_fields

LEVELS = ("debug", "info", "warning", "error")  # of the log
DEFAULT_CONTEXT = 4096  # tokens, unless the target has fewer


@dataclass(kw_only=True)
class ServerLimits:
    """Limits of the server.

    Attributes:
        max_requests: requests that are decoded at the same time.
        queue: requests that may wait; further ones are answered with 429.
        max_context: tokens of a prompt and its answer; default: 4096, or the target's context length if that is shorter.
        prefill_tokens: tokens of a new prompt that are read between two rounds of other requests.
        max_body_mb: size of a request, in MB.
        max_images: images and video frames of a request.
        drain_seconds: seconds that answers in progress have to end after a signal to stop.
        max_pixels: pixels of all images and frames of a request together, before they are resized.

    Raises:
        ValueError: a value out of range.
    """

    max_requests: PositiveInt = 8
    queue: NonNegativeInt = 32
    max_context: PositiveInt | None = None
    prefill_tokens: PositiveInt = 512
    max_body_mb: PositiveFloat = 32.0
    max_images: NonNegativeInt = 32
    max_pixels: PositiveInt = 16_000_000
    drain_seconds: NonNegativeFloat = 30.0

    def __post_init__(self) -> None:
        check_fields(self)
        self.max_body_bytes = int(self.max_body_mb * 1e6)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask for what; the fields are options of `sage-serve`, and `is_local`: whether it listens on this machine only."""

    api_key: str = ""  # that clients must send; empty: none
    is_local: bool = True
    ignore_unknown_fields: bool = False
    allowed_origins: Collection[str] = ()  # of web pages; "*" for all
    allow_remote_media: Collection[str] = ()  # hosts that images may be downloaded from, in lower case
