"""Checks of the URLs and the key of the servers before anything is loaded. Imports neither torch nor an HTTP library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from data_prep.config import KEY_VARIABLE, RegenerateConfig
from sage.io.ranges import check_fields

SCHEMES = ("http", "https")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_server(settings: RegenerateConfig, environment: Mapping[str, str]) -> None:
    """Checks the settings of the servers; a ValueError names neither a URL nor the key of a server."""
    if not isinstance(settings.server, (str, list)) or not all(isinstance(url, str) for url in settings.server):
        raise ValueError(f"regenerate.server: {type(settings.server).__name__}; allowed: a URL or a list of URLs")
    for number, url in enumerate(settings.urls(), 1):
        if problem := url_problem(url, "the variable of regenerate.key_variable"):
            raise ValueError(f"regenerate.server: URL {number} {problem}; give for example http://host:8000/v1")
    check_fields(settings, "regenerate.")
    read_key(settings, environment)


def read_key(settings: RegenerateConfig, environment: Mapping[str, str]) -> str:
    """Returns the key of the servers, empty if they have none; ValueError for a missing variable or a key that is none."""
    name = settings.key_variable
    if not NAME.fullmatch(name):
        raise ValueError(
            "regenerate.key_variable: not the name of an environment variable; the key itself stays out of settings"
        )
    if name != KEY_VARIABLE and name not in environment:
        raise ValueError("regenerate.key_variable: the environment has no variable of this name; export it")
    key = environment.get(name, "")
    if not is_key(key):
        raise ValueError(f"regenerate.key_variable: {name} has a line break, a blank or another character that no key has")
    return key


def is_key(key: str) -> bool:
    """Returns whether a key can be sent. An empty key is not sent."""
    return key.isascii() and key.isprintable() and " " not in key


def url_problem(url: str, key_variable: str) -> str:
    """Describes the problem of a server's URL without repeating the URL; empty if the URL is valid.

    Args:
        key_variable: environment variable for a key, named in the message.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:
        return "is not valid"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "has a line break, a blank or another character that no URL has"
    if parts.scheme not in SCHEMES:
        return f"is not of the scheme {' or '.join(SCHEMES)}"
    if parts.username is not None or parts.password is not None:
        return f"has a user or a password in it; export the key in {key_variable}"
    if not parts.hostname:
        return "has no host"
    if parts.query or parts.fragment:
        return "has a query or a fragment"
    return ""
