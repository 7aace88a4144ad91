"""Names of the policies, found without importing them: neither torch nor a policy's module is loaded.

Every module of this folder is a policy of its name, except the shared modules below. The module holds the policy's class
(`name`, options and their defaults); nothing else has to be registered.
"""

from __future__ import annotations

import sys
from pkgutil import iter_modules

AUTOREGRESSIVE, CHAIN, SAGE = "autoregressive", "chain", "sage"  # of special use: baseline, first answers, score of a draft

_SHARED = {"base", "level", "names", "options", "ranking", "tree"}

POLICIES: tuple[str, ...] = tuple(
    module.name for module in iter_modules(sys.modules["sage.trees"].__path__) if module.name not in _SHARED
)
