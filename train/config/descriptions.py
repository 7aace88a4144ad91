"""Meanings of configuration keys and choices, read where they are defined: docstrings of dataclasses, comments of YAML files.

The options of policies are read from the source of their modules, whose import would load torch.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

import sage.trees
from checkpoints.run_folder import dotted_keys
from sage.drafts.registry import KINDS
from sage.io.docstrings import first_sentence, parse_section
from sage.io.files import config_dir
from sage.trees import POLICIES
from train.config.store import POLICY_GROUP

UNLISTED = ("name", "kind", "defaults", "architecture.")  # values of a choice that do not describe it


@dataclass(frozen=True)
class Option:
    """An option of a policy: its default as on a command line, and its meaning."""

    default: str
    meaning: str


def choice_meaning(group: str, choice: str) -> str:
    """Returns the meaning of `group=choice`: the comment at the top of its file, else the values it sets."""
    if group == POLICY_GROUP:
        return first_sentence(ast.get_docstring(_policy_class(choice)))
    if group == "draft":
        return first_sentence(KINDS[choice].options.__doc__)
    path = config_dir() / group / f"{choice}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#") and "@package" not in line)
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    values = {key: value for key, value in dotted_keys(content).items() if not key.startswith(UNLISTED)}
    set_ = ", ".join(f"{key}={value}" for key, value in values.items() if "${" not in str(value))
    return comment.removesuffix(".") or set_


@cache
def policy_options(policy: str) -> dict[str, Option]:
    """Returns the options of a policy, as `sage.planning.options.defaults` does, with their meanings."""
    node = _policy_class(policy)
    bases = [base.id.lower() for base in node.bases if isinstance(base, ast.Name) and base.id.lower() in POLICIES]
    found = {name: option for base in bases for name, option in policy_options(base).items()}
    meanings = parse_section(ast.get_docstring(node) or "")
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
            found[field.target.id] = Option(_written(field.value), "")
    return {name: Option(one.default, meanings.get(name, one.meaning).removesuffix(".")) for name, one in found.items()}


def _policy_class(policy: str) -> ast.ClassDef:
    """Returns the parsed class of a policy: the one with its name as `name`."""
    folder = Path(sage.trees.__file__).parent
    path = folder / f"{policy}.py" if (folder / f"{policy}.py").is_file() else folder / policy / "policy.py"
    classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    [found] = [node for node in classes if any(ast.unparse(line) == f"name = {policy!r}" for line in node.body)]
    return found


def _written(value: ast.expr) -> str:
    """Returns a default as on a command line: `true`, `null`, the value of an enum's member."""
    if isinstance(value, ast.Attribute):
        return value.attr.lower()
    text = ast.unparse(value)
    return {"True": "true", "False": "false", "None": "null"}.get(text, text)
