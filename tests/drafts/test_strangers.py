"""Downloaded folders run no code: neither from a pickle nor from Python files that the config names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.data_helpers import save_target

import sage
from checkpoints.export.target import TargetFacts
from sage.targets.loading import load_processor

ROOT = Path(__file__).resolve().parents[2]
CODE = "from pathlib import Path\nPath({mark!r}).touch()\nfrom transformers import PreTrainedConfig as Config, {base} as Mine\n"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """Returns a target folder whose config, tokenizer and image processor name remote code."""
    folder = save_target("qwen2_5_vl", tmp_path / "evil")
    (folder / "mine.py").write_text(CODE.format(mark=str(tmp_path / "ran"), base="PreTrainedTokenizerFast"))
    return folder


def name_code(folder: Path, file: str, keys: dict[str, str], **changes: str) -> None:
    path = folder / file
    content = json.loads(path.read_text()) | {"auto_map": keys} | changes
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "keys", "changes"),
    [
        ("config.json", {"AutoConfig": "mine.Config", "AutoModel": "mine.Mine"}, {"model_type": "mine"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}, {"tokenizer_class": "Mine"}),
        ("preprocessor_config.json", {"AutoImageProcessor": "mine.Mine"}, {"image_processor_type": "Mine"}),
    ],
)
def test_code_of_a_target_is_not_run(
    evil: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, keys: dict[str, str], changes: dict[str, str]
) -> None:
    """There is no interactive question either: it would block a batch job."""

    questions: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *question: questions.append(question) or "y")
    name_code(evil, file, keys, **changes)
    for load in (sage.load_target, lambda folder: load_processor(str(folder)), TargetFacts.of_folder):
        try:
            load(evil)
        except ValueError as error:
            assert file != "config.json" or "cannot read its config.json" in str(error)
    assert not questions
    assert not (tmp_path / "ran").exists()


def test_pickles_are_opened_for_tensors_only() -> None:
    """torch.load only with weights_only, the pickle module only for its errors, numpy without objects, no remote code."""
    allowed = {"weights_only=True", "trust_remote_code=False", "pickle.UnpicklingError", "import pickle"}
    pattern = re.compile(
        r"weights_only=\w+|trust_remote_code=\w+|allow_pickle=\w+|import pickle|\bpickle\.\w+|joblib|torch\.load\([^)]*"
    )
    for package in ("sage", "train", "data_prep", "checkpoints"):
        for path in (ROOT / package).rglob("*.py"):
            for found in pattern.findall(path.read_text()):
                text = "weights_only=True" if found.startswith("torch.load(") and "weights_only=True" in found else found
                assert text in allowed, f"{path}: {found}"
