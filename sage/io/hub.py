"""Whether the Hugging Face hub can be reached, checked once, before transformers or datasets retry for half a minute."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

TIMEOUT_S = 10


class HubUnreachable(ValueError):
    """A model or data set is not on this machine and cannot be downloaded. The message names it and the remedy."""


def require_hub(name: str, key: str) -> None:
    """Raises HubUnreachable unless a model or data set is local or cached, or the hub can be reached.

    Args:
        name: a hub id; a path is not checked.
        key: of the setting, for the message.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path or Path(name).exists():
        return
    datasets = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    if is_cached or (datasets / name.replace("/", "___").lower()).exists():
        return
    remedy = "give a local folder, or set HF_HOME to a cache that contains it and HF_HUB_OFFLINE=1"
    if constants.is_offline_mode():
        raise HubUnreachable(
            f"{key}: {name}: not in the cache {constants.HF_HOME}, and HF_HUB_OFFLINE forbids downloads; {remedy}"
        )
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception as error:  # the HTTP library and its errors differ between versions of huggingface_hub
        raise HubUnreachable(
            f"{key}: {name}: not in the cache {constants.HF_HOME}, and {constants.ENDPOINT} cannot be reached "
            f"({' '.join(str(error).split()) or type(error).__name__}); {remedy}"
        ) from error
