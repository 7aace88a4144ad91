"""The schemas and YAML files as Hydra finds them: choices of a group, with their meanings."""

from __future__ import annotations

import ast
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import sage.trees
from checkpoints.run_folder import dotted_keys
from sage.drafts.registry import KINDS, DraftKind
from sage.io.files import config_dir
from sage.io.ranges import first_sentence
from sage.trees import POLICIES
from train.config.draft import CompressorConfig, ConcatConfig, RatioConfig, ResamplerConfig, SelectConfig, draft_schema
from train.config.schema import Config, TrackingConfig, ValidateConfig, WandbConfig

POLICY_GROUP = "decode/policy"
UNLISTED = ("name", "kind", "defaults", "architecture.")  # values of a choice that do not describe it
_registered: tuple[dict[str, DraftKind], tuple[str, ...]] | None = None  # kinds and policies
_SUBSCHEMAS: dict[tuple[str, str], type] = {
    ("draft/compressor", "none"): CompressorConfig,
    ("draft/compressor", "prune"): RatioConfig,
    ("draft/compressor", "pool"): RatioConfig,
    ("draft/compressor", "conv"): RatioConfig,
    ("draft/compressor", "resampler"): ResamplerConfig,
    ("draft/compressor", "text_only"): CompressorConfig,
    ("draft/compressor", "weighted"): RatioConfig,
    ("draft/compressor", "concat"): ConcatConfig,
    ("draft/compressor", "select"): SelectConfig,
    ("tracking", "jsonl"): TrackingConfig,
    ("tracking", "tensorboard"): TrackingConfig,
    ("tracking", "wandb"): WandbConfig,
}


def subschemas() -> dict[tuple[str, str], type]:
    """Returns (group, choice) -> schema, for groups whose choices have different keys."""
    return {("draft", name): draft_schema(kind) for name, kind in KINDS.items()} | _SUBSCHEMAS


def group_choices(group: str) -> list[str]:
    """Returns the choices of a group, sorted; none for an unknown group."""
    files = {path.stem for path in (config_dir() / group).glob("*.yaml")}
    policies = POLICIES if group == POLICY_GROUP else ()
    return sorted({*files, *policies, *(choice for where, choice in subschemas() if where == group)})


def choice_meaning(group: str, choice: str) -> str:
    """Returns the meaning of `group=choice`: the comment at the top of its file, else the values it sets."""
    if group == "draft":
        return first_sentence(KINDS[choice].options.__doc__)
    if group == POLICY_GROUP:
        return _policy_meaning(choice)
    path = config_dir() / group / f"{choice}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#") and "@package" not in line)
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    values = {key: value for key, value in dotted_keys(content).items() if not key.startswith(UNLISTED)}
    set_values = ", ".join(f"{key}={value}" for key, value in values.items() if "${" not in str(value))
    return comment.removesuffix(".") or set_values


def _policy_meaning(policy: str) -> str:
    """Returns the first sentence about a policy, from the source of its class: importing it would load torch."""
    folder = Path(sage.trees.__file__).parent
    path = folder / f"{policy}.py" if (folder / f"{policy}.py").is_file() else folder / policy / "policy.py"
    classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    [found] = [node for node in classes if any(ast.unparse(line) == f"name = {policy!r}" for line in node.body)]
    return first_sentence(ast.get_docstring(found))


def register() -> None:
    """Registers the schemas for `defaults` lists: the roots, kinds of draft, one per choice under `schema/`, policies.

    Does nothing unless kinds or policies were added since the last call.
    """
    global _registered
    if _registered == (KINDS, POLICIES):
        return
    _registered = (dict(KINDS), POLICIES)
    store = ConfigStore.instance()
    store.store(name="train_schema", node=Config)
    store.store(name="validate_schema", node=ValidateConfig)
    for name, kind in KINDS.items():  # a kind is a choice without a YAML file
        store.store(group="draft", name=name, node=draft_schema(kind))
    for (group, choice), schema in _SUBSCHEMAS.items():
        store.store(group=f"schema/{group}", name=choice, node=schema)
    for name in POLICIES:  # with the defaults of its class; options are added without `+`
        options = OmegaConf.create({}, flags={"struct": False})
        store.store(group=POLICY_GROUP, name=name, package="decode.options", node={name: options})
