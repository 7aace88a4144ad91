"""An export on the Hugging Face hub. The client finds the token by itself; none is read or shown here."""

from __future__ import annotations

import logging
from pathlib import Path

from checkpoints.export.facts import read_json
from checkpoints.export.writing import ABOUT, find_damage

logger = logging.getLogger(__name__)


def push(folder: Path, repo_id: str, private: bool = False) -> str:
    """Uploads a sealed export in one commit.

    Args:
        repo_id: `owner/name`; made if it does not exist.

    Returns:
        the address of the commit.

    Raises:
        ValueError: `repo_id` is no hub id, the folder is damaged, or the hub refused; names what it said.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if repo_id.count("/") != 1:
        raise ValueError(f"--push-to-hub {repo_id}: give a hub id like owner/name")
    find_damage(folder)
    target = (read_json(folder / ABOUT).get("target") or {}).get("name")
    if target and Path(target).exists():
        raise ValueError(
            f"--push-to-hub: the export calls its target {target}, a folder of this machine: export with --target-name"
        )
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True, repo_type="model")
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"Draft head exported as {folder.name}")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--push-to-hub {repo_id}: {reason}; the export itself is whole in {folder}: log in with `hf auth login` and "
            f"push again"
        ) from error
    return str(commit.commit_url)
