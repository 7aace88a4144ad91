"""The folder of an export: written atomically, verified against its manifest, uploaded to the Hugging Face hub.

An export appears under its name only when complete (checkpoints.files describes the temporary names). Owns: the folder. Does
not own: its content (checkpoints.export.exporter, checkpoints.export.importer).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from checkpoints.files import new_folder, restore_interrupted
from sage.drafts.location import EXPORT_INFO
from sage.io.files import read_json
from sage.io.manifest import MANIFEST, CorruptFolder, has_manifest, verify_manifest, write_manifest


@contextmanager
def new_export(out: Path, step: int, overwrite: bool = False) -> Iterator[Path]:
    """Yields a folder to write into; it is checksummed and renamed to `out` when the block ends, removed if it fails.

    Args:
        step: optimizer steps the draft was trained for, recorded in the manifest.
        overwrite: replace an existing export; any other existing folder is refused.

    Raises:
        ValueError: `out` exists.
        OSError: the disk is full or not writable; `out` is unchanged.
    """
    restore_interrupted(out)
    _refuse_existing(out, overwrite)
    try:
        with new_folder(out) as part:
            yield part
            write_manifest(part, step)
    except (OSError, SafetensorError) as error:  # safetensors raises the latter for a full disk
        raise OSError(f"--out {out}: could not be written ({error}); no partial export was left there") from error


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not has_manifest(out):
        raise ValueError(f"--out {out}: exists and was not written by sage-export; give another folder")
    if not overwrite:
        raise ValueError(f"--out {out}: exists; give another folder, or --overwrite to replace it")


def export_info(folder: Path) -> dict[str, Any]:
    """Reads sage_export.json; empty if the folder has none."""
    return read_json(folder / EXPORT_INFO) if (folder / EXPORT_INFO).is_file() else {}


def verify_export(folder: Path) -> None:
    """Compares every file of an export with its manifest, and the manifest's step with the one in sage_export.json.

    Raises:
        CorruptFolder: names the file that differs.
    """
    step = verify_manifest(folder)["step"]
    info = export_info(folder)
    if info and info.get("step") != step:  # no file's hash depends on the manifest's step
        raise CorruptFolder(f"{folder / MANIFEST}: corrupt: step {step}, {info.get('step')} in {EXPORT_INFO}")


def push_to_hub(folder: Path, repo_id: str, private: bool = False) -> str:
    """Uploads a verified export in one commit to `owner/name`, created if needed; returns the URL of the commit.

    Raises:
        ValueError: `repo_id` is not a hub id, the folder is corrupt, or the hub refused the upload.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if repo_id.count("/") != 1:
        raise ValueError(f"--push-to-hub {repo_id}: give a hub id like owner/name")
    verify_export(folder)
    target = (export_info(folder).get("target") or {}).get("name")
    if target and Path(target).exists():
        raise ValueError(f"--push-to-hub: the export names its target {target}, a local folder: export with --target-name")
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True, repo_type="model")
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=f"Draft head exported as {folder.name}")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--push-to-hub {repo_id}: {reason}; the export in {folder} is complete: log in with `hf auth login` and push again"
        ) from error
    return str(commit.commit_url)
