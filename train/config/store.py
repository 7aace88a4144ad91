"""What Hydra composes from: schemas, choices of groups and resolvers; the keys of a schema, and their meanings."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

import sage.trees
from checkpoints.run_folder import dotted_keys
from sage.drafts.registry import KINDS, DraftKind
from sage.io.dtypes import SHORT_NAMES, loaded_dtype
from sage.io.files import config_dir, package_dir, read_json, user_cache_dir
from sage.io.ranges import field_types, first_sentence, key_meanings, plain_type
from sage.trees import POLICIES
from train.config.draft import CompressorKind, compressor_schema, draft_schema
from train.config.schema import RECIPE_LENGTH, Config, Precision, TrackingConfig, ValidateConfig, WandbConfig

LABEL = "LABEL"  # stands for a name that the user chooses
LABELED = ("data.sources",)  # mappings with such names
POLICY_GROUP = "decode/policy"
BY_PATH = "target=by_path"  # the choice for a target given by its path alone
LONGEST_PART = 40  # characters of a part of a run's name
UNLISTED = ("name", "kind", "defaults", "architecture.")  # values of a choice that do not describe it
TRACKING = {"jsonl": TrackingConfig, "tensorboard": TrackingConfig, "wandb": WandbConfig}


def subschemas() -> dict[tuple[str, str], type]:
    """Returns (group, choice) -> schema, for groups whose choices have different keys."""
    schemas: dict[tuple[str, str], type] = {("draft", name): draft_schema(kind) for name, kind in KINDS.items()}
    schemas |= {("draft/compressor", kind): compressor_schema(kind) for kind in CompressorKind}
    return schemas | {("tracking", kind): schema for kind, schema in TRACKING.items()}


def group_choices(group: str) -> list[str]:
    """Returns the choices of a group, sorted; none for an unknown group."""
    files = {path.stem for path in (config_dir() / group).glob("*.yaml")}
    policies = POLICIES if group == POLICY_GROUP else ()
    return sorted({*files, *policies, *(choice for where, choice in subschemas() if where == group)})


def choice_meaning(group: str, choice: str) -> str:
    """Returns the meaning of `group=choice`: the docstring of its class, the comment at the top of its file, or its values."""
    if group == "draft":
        return first_sentence(KINDS[choice].options.__doc__)
    if group == POLICY_GROUP:  # from the source of its class: importing it would load torch
        folder = Path(sage.trees.__file__).parent
        path = folder / f"{choice}.py" if (folder / f"{choice}.py").is_file() else folder / choice / "policy.py"
        classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
        [node] = [node for node in classes if any(ast.unparse(line) == f"name = {choice!r}" for line in node.body)]
        return first_sentence(ast.get_docstring(node))
    path = config_dir() / group / f"{choice}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#") and "@package" not in line)
    values = dotted_keys(cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path))))
    described = (f"{key}={value}" for key, value in values.items() if not key.startswith(UNLISTED) and "${" not in str(value))
    return comment.removesuffix(".") or ", ".join(described)


def register() -> None:
    """Registers the schemas and the resolvers; `package_dir:PACKAGE` is the folder of an installed package."""
    register_schemas(tuple(KINDS.values()), POLICIES)
    OmegaConf.register_new_resolver("user_cache", lambda: str(user_cache_dir()), replace=True)
    resolvers = (package_dir, run_name, target_name, target_dtype, lr_for_width, max_length_for, sequences_per_pass)
    for resolve in resolvers:
        OmegaConf.register_new_resolver(resolve.__name__, resolve, replace=True)


@cache
def register_schemas(kinds: tuple[DraftKind, ...], policies: Sequence[str]) -> None:
    """Registers the schemas for `defaults` lists, once per set of kinds and policies: the roots, choices, policies."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=Config)
    store.store(name="validate_schema", node=ValidateConfig)
    for (group, choice), schema in subschemas().items():
        store.store(group=group if group == "draft" else f"schema/{group}", name=choice, node=schema)  # drafts have no files
    for name in policies:  # with the defaults of its class; options are added without `+`
        options = OmegaConf.create({}, flags={"struct": False})
        store.store(group=POLICY_GROUP, name=name, package="decode.options", node={name: options})


@dataclass(frozen=True)
class Key:
    """A key of a schema."""

    hint: Any  # the annotation of its field, ranges included
    default: Any  # `MISSING` without one
    meaning: str
    section: str  # what its part of the configuration is about
    choices: tuple[str, ...] = ()  # of its group, that have it; empty: all


def keys_of(schema: type, prefix: str = "") -> dict[str, Key]:
    """Returns the dotted keys of a schema, those of every choice of its groups included; keys of groups follow the others."""
    owners = {choice: owner for (group, choice), owner in subschemas().items() if group == group_of(prefix)} or {"": schema}
    having: dict[str, list[str]] = {}
    fields: dict[str, dataclasses.Field[Any]] = {}
    for choice, owner in owners.items():
        for field in dataclasses.fields(owner):
            having.setdefault(field.name, []).append(choice)
            fields.setdefault(field.name, field)
    keys: dict[str, Key] = {}
    nested: dict[str, Key] = {}
    for name, choices in having.items():
        owner, key, field = owners[choices[0]], prefix + name, fields[name]
        hint = field_types(owner)[name]
        kind = plain_type(hint)
        if dataclasses.is_dataclass(kind):
            nested |= keys_of(cast(type, kind), f"{key}.")
        elif key in LABELED:
            nested |= keys_of(get_args(kind)[1], f"{key}.{LABEL}.")
        else:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = MISSING if default is dataclasses.MISSING else default
            meaning = key_meanings(owner).get(name, "").removesuffix(".")
            owned = tuple(choices) if len(choices) < len(owners) else ()
            keys[key] = Key(hint, default, meaning, first_sentence(schema.__doc__), owned)
    return keys | nested


def group_of(prefix: str) -> str:
    """Returns the group of choices with a dotted name, `draft.compressor.` -> `draft/compressor`."""
    return prefix.rstrip(".").replace(".", "/")


def key_of(override: str) -> str:
    """Returns the key: `+group@package=choice` -> `group`; `key=value` -> `key`."""
    return override.split("=", 1)[0].lstrip("+~").split("@")[0]


# -- resolvers ${NAME:...} of the YAML files: names of runs, and what a target's folder says about it --------------------------


def run_name(target: str, draft: str, path: str | None, data: str, objective: str) -> str:
    """Returns `TARGET-DRAFT-DATA[-OBJECTIVE]`; data are named by the last part of `path` without suffix, else by `data`."""
    parts = [target, draft, Path(path).name.split(".")[0] if path else data]
    if objective not in ("", draft):
        parts.append(objective)
    return "-".join(plain_name(part)[:LONGEST_PART] for part in parts)


def plain_name(part: str) -> str:
    """Replaces characters that a shell or Hydra would interpret."""
    return re.sub(r"[^\w.]+", "_", part).strip("_.") or "data"


def target_name(path: str) -> str:
    """Returns the last part of a folder or hub id."""
    return Path(os.path.abspath(Path(path).expanduser())).name


def target_dtype(path: str) -> Precision:
    """Returns the precision for the dtype in a local folder's config.json (`dtype`, in older files `torch_dtype`)."""
    config = _read_config(path)
    return Precision(SHORT_NAMES[loaded_dtype(config.get("dtype") or config.get("torch_dtype"))])


def lr_for_width(path: str, lr: float, width: int) -> float:
    """Returns the learning rate for a local folder's hidden size from `lr`, that at `width`, which is kept if it is unknown.

    Ref: Tensor Programs V, arXiv 2203.03466, table 3: Adam's rate of hidden weights scales with 1 / width.
    """
    config = _read_config(path)
    text = config.get("text_config")
    size = text.get("hidden_size") if isinstance(text, dict) else config.get("hidden_size")
    return float(f"{lr * width / size:.2g}") if isinstance(size, int) and size > 0 else lr


def max_length_for(path: str, default: int) -> int:
    """Returns `recipe.max_length` of a shipped target with the `model_type` of a local folder; `default` if there is none."""
    line = f"\n  model_type: {_read_config(path).get('model_type')}\n"
    texts = (file.read_text(encoding="utf-8") for file in sorted((config_dir() / "target").glob("*.yaml")))
    shipped = next((text for text in texts if line in text), "{}")
    return int(OmegaConf.select(OmegaConf.create(shipped), "recipe.max_length") or default)


def sequences_per_pass(most: int, max_length: int | None) -> int:
    """Returns the default of `train.micro_batch_size`: `most` sequences of 4096 tokens; of longer ones half, a quarter, .."""
    limit = most * RECIPE_LENGTH
    while most > 1 and most * (max_length or 0) > limit:
        most //= 2
    return most


def _read_config(path: str) -> dict[str, Any]:
    """The folder's config.json; empty if it is missing or unreadable, which loading the target reports."""
    try:
        return read_json(Path(path).expanduser() / "config.json")
    except ValueError:
        return {}
