"""Imports third-party EAGLE-3 drafts in the layouts of SpecForge, AngelSlim, SafeAILab and speculators.

The imported draft computes exactly what was trained; what our head cannot express is refused by name. Fields that only affect
engines (class name, context length) are ignored here; `sage-export --check` reports them.

Owns: reading and converting. Does not own: the expected tensors (checkpoints.export.formats), decoding (sage).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sage
from checkpoints.export.export_folder import EXPORT_INFO, new_export
from checkpoints.export.formats.layout import (
    LEVELS_KEY,
    EngineConfig,
    Format,
    TensorSpecs,
    are_valid_levels,
    default_levels,
    eagle3_tensor_specs,
    is_sage_draft,
)
from checkpoints.export.formats.speculators import eagle3_name
from checkpoints.export.target_facts import EMBEDDING, TargetFacts, read_target_embedding
from checkpoints.export.validator.tensor_checks import check_vocabulary_maps
from checkpoints.export.weight_files import CONFIG, Weights
from sage.drafts.eagle3 import Eagle3Config, Eagle3Draft
from sage.io.files import read_json, write_json
from sage.io.manifest import refuse_corrupt_draft
from sage.io.model_files import read_config
from sage.targets.rope import RopeConfig

PREFIXES = ("model.", "draft_model.", "module.")
IGNORED = (EMBEDDING, "verifier_lm_head.weight", "verifier_norm.weight")  # the target's own tensors
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias")
BF16_EPS = 2**-7  # relative rounding error of bf16


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Values that the folder of a third-party draft leaves open.

    Attributes:
        levels: feature levels, where the folder gives none or contradictory ones.
        image_inputs: draft inputs at image positions in training; None = as in sage_export.json, else `embed`.
        use_target_rope: use the target's rope even if the folder's config specifies another.
    """

    levels: tuple[int, ...] | None = None
    image_inputs: str | None = None
    use_target_rope: bool = False


def convert(
    folder: Path | str, target: str, out: Path | str, options: ImportOptions | None = None, overwrite: bool = False
) -> Path:
    """Converts a third-party EAGLE-3 draft to a draft of this package, written atomically to `out`, which is returned.

    Args:
        target: folder or hub id of the draft's target.

    Raises:
        ValueError: names what cannot be imported, or that `out` exists.
    """
    folder, out = Path(folder), Path(out)
    facts = TargetFacts.of_folder(target)
    draft = read_eagle3(folder, facts, options)
    if (Path(target) / CONFIG).is_file():
        check_embedding(folder, read_target_embedding(facts))
    origin = _export_info(folder)
    step = int(origin.get("step") or 0)
    with new_export(out, step, overwrite) as part:
        draft.save_pretrained(part)
        write_json(part / EXPORT_INFO, _import_info(draft, folder, facts, origin, step))
    return out


def load_any(folder: Path | str, target: sage.Target, options: ImportOptions | None = None) -> Any:
    """Loads a draft of this package or a third-party EAGLE-3 draft, on the target's device and in its dtype.

    Raises:
        ValueError: neither of them, corrupt, or not for this target.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file() or EngineConfig(read_config(folder)).format is None:
        return sage.load_draft(folder, target)
    refuse_corrupt_draft(folder)
    draft = read_eagle3(folder, TargetFacts.of_config(target.model.config, target.name), options)
    check_embedding(folder, target.embed_tokens.weight.detach().cpu())
    return draft.to(device=target.device, dtype=target.dtype)


def check_embedding(folder: Path, embedding: Tensor) -> None:
    """Refuses a draft whose embedding is not the target's, [V, D]: our decoder uses the target's for every draft.

    Raises:
        ValueError: the embedding in the folder differs from the target's by more than rounding to bf16.
    """
    weights = Weights(folder)
    for name in weights.infos:
        if name not in (EMBEDDING, *(prefix + EMBEDDING for prefix in PREFIXES)):
            continue
        own = weights[name]
        gap = (own.float() - embedding.float()).abs().max() if own.shape == embedding.shape else torch.tensor(torch.inf)
        if not bool(gap <= BF16_EPS * embedding.abs().max()):
            raise ValueError(
                f"{folder}: {name} differs from the target's by up to {float(gap):.3g}: it was trained, but our decoder uses "
                f"the target's embedding for every draft; cannot import it"
            )


def read_eagle3(folder: Path, facts: TargetFacts, options: ImportOptions | None = None) -> Eagle3Draft:
    """Reads a third-party EAGLE-3 draft as `Eagle3Draft`, in the dtype of its file.

    Args:
        folder: contains config.json and model.safetensors, shards, or a pytorch_model.bin of tensors only.

    Raises:
        ValueError: names the field or tensor that is wrong, missing, or cannot be expressed.
    """
    options = options or ImportOptions()
    config = EngineConfig(read_config(folder))
    if is_sage_draft(config.raw):
        raise ValueError(f"{folder}: already a draft of this package; sage-validate and sage-generate load it as it is")
    if config.format not in (Format.eagle3, Format.speculators):
        found = config.raw.get("architectures") or config.raw.get("model_type")
        raise ValueError(f"{folder / CONFIG}: {found} is not an EAGLE-3 draft; only those can be imported")
    own_config = _read_config(folder, config, facts, options)
    tensors = _read_tensors(folder, config, facts)
    draft = Eagle3Draft(own_config)
    draft.to(tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors)
    return draft.eval()


def _read_config(folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> Eagle3Config:
    _check_config(folder, config, facts)
    eps, activation = config.get("rms_norm_eps", 1e-6), config.get("hidden_act", "silu")
    if not isinstance(eps, float) or not 0 < eps < 1 or activation not in ("silu", "gelu", "relu"):
        raise ValueError(f"{folder / CONFIG}: rms_norm_eps {eps!r} or hidden_act {activation!r} is invalid")
    rope = _read_rope(folder, config, facts, options)
    return Eagle3Config(
        hidden_size=facts.hidden_size,
        intermediate_size=config.size("intermediate_size"),
        num_attention_heads=config.size("num_attention_heads"),
        num_key_value_heads=config.size("num_key_value_heads"),
        head_dim=config.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=config.size("draft_vocab_size") or facts.vocab_size,
        max_position_embeddings=facts.max_position_embeddings,
        rms_norm_eps=eps,
        hidden_act=activation,
        **rope.fields,
        norm_before_residual=_read_norm_before_residual(folder, config),
        feature_levels=_read_levels(folder, config, facts, options),
        image_inputs=options.image_inputs or _export_info(folder).get("image_inputs") or "embed",
        target=facts.fingerprint,
        target_path=facts.name,
    )


def _check_config(folder: Path, config: EngineConfig, facts: TargetFacts) -> None:
    for key in UNSUPPORTED:
        if config.get(key):
            raise ValueError(
                f"{folder}: {config.key_path(key)} is {config.get(key)}: our EAGLE-3 head does not support it, cannot import it"
            )
    num_layers = config.get("num_hidden_layers", 1)
    if num_layers not in (1, facts.num_layers):  # some trainers copy the target's layer count; the tensors have one layer
        raise ValueError(f"{folder}: {config.key_path('num_hidden_layers')} is {num_layers}: our head has one layer")
    for key in ("hidden_size", "vocab_size"):
        if config.size(key) != getattr(facts, key):
            raise ValueError(
                f"{folder}: {config.key_path(key)} is {config.get(key)}, that of the target ({facts.name or facts.model_type}) "
                f"is {getattr(facts, key)}; give the target it was trained for"
            )
    if eagle3_tensor_specs(config) is None:
        raise ValueError(f"{folder / CONFIG}: layer sizes are missing; give the number of heads and intermediate_size")


def _read_norm_before_residual(folder: Path, config: EngineConfig) -> bool:
    if config.format == Format.speculators and "norm_before_residual" not in config.raw:
        raise ValueError(
            f"{folder / CONFIG}: norm_before_residual is missing: engines assume true, others false; add the value used in "
            f"training"
        )
    return bool(config.raw.get("norm_before_residual", False))


def _read_rope(folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> RopeConfig:
    rope = config.rope
    if options.use_target_rope:
        return facts.rope
    if not rope.theta > 0:
        raise ValueError(f"{folder}: {config.key_path('rope_theta')} is not a positive number")
    if rope.scaled != facts.scaled_rope or rope.axes != facts.rope.axes:
        raise ValueError(
            f"{folder}: {config.key_path('rope_scaling')} is {rope.scaled or 'unscaled'} with mrope_section {rope.axes}, "
            f"the target's is {facts.scaled_rope or 'unscaled'} with {facts.rope.axes}: positions would differ from "
            f"training; --use-target-rope uses the target's"
        )
    return rope


def _read_levels(folder: Path, config: EngineConfig, facts: TargetFacts, options: ImportOptions) -> list[int]:
    vllm, sglang = config.vllm_levels, config.sglang_levels
    if options.levels:
        levels = list(options.levels)
    elif vllm and sglang and vllm != sglang:
        raise ValueError(
            f"{folder / CONFIG}: {LEVELS_KEY} means hidden_states{vllm} to vLLM and, in eagle_config, hidden_states{sglang} to "
            f"SGLang; give the levels used in training: --levels A,B,C"
        )
    else:
        levels = vllm or sglang or default_levels(facts.num_layers)
    if not are_valid_levels(levels, facts.num_layers):
        raise ValueError(
            f"{folder}: feature levels {levels}: need three increasing ones of 0..{facts.num_layers - 1}; give --levels A,B,C"
        )
    return levels


def _read_tensors(folder: Path, config: EngineConfig, facts: TargetFacts) -> dict[str, Tensor]:
    """Reads the tensors under our names; refuses missing, unknown and misshapen ones."""
    weights = Weights(folder)
    written = eagle3_tensor_specs(config)
    assert written is not None
    specs = {eagle3_name(name): spec for name, spec in written.items()}
    names = {name: _our_name(name) for name in weights.infos}
    wanted = {theirs: ours for theirs, ours in names.items() if ours not in IGNORED and not ours.endswith(IGNORED_SUFFIXES)}
    _check_names(folder, wanted, specs)
    tensors = {ours: weights[theirs] for theirs, ours in wanted.items()}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != specs[name].shape:
            raise ValueError(
                f"{folder}: {name} has shape {list(tensor.shape)}, {list(specs[name].shape)} according to config.json"
            )
    return _with_vocabulary_maps(folder, tensors, specs, facts.vocab_size)


def _our_name(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return eagle3_name(name)


def _check_names(folder: Path, wanted: dict[str, str], specs: TensorSpecs) -> None:
    missing = [name for name, spec in specs.items() if not spec.is_optional and name not in wanted.values()]
    unknown = sorted(theirs for theirs, ours in wanted.items() if ours not in specs)
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing)}: missing; the draft is incomplete")
    if unknown:
        raise ValueError(f"{folder}: {', '.join(unknown)}: not part of our EAGLE-3 head, cannot import this draft")


def _with_vocabulary_maps(folder: Path, tensors: dict[str, Tensor], specs: TensorSpecs, vocab: int) -> dict[str, Tensor]:
    """Adds d2t and t2d where the folder omits them: our head always has both."""
    d2t = tensors.get("d2t", torch.zeros(specs["d2t"].shape, dtype=torch.int64)).to(torch.int64)
    if problem := check_vocabulary_maps(d2t, tensors.get("t2d"), vocab):
        raise ValueError(f"{folder}: {problem.where}: {problem.found}; {problem.effect}")
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    return {**tensors, "d2t": d2t, "t2d": t2d}


def _export_info(folder: Path) -> dict[str, Any]:
    return read_json(folder / EXPORT_INFO) if (folder / EXPORT_INFO).is_file() else {}


def _import_info(draft: Eagle3Draft, folder: Path, facts: TargetFacts, origin: dict[str, Any], step: int) -> dict[str, object]:
    return {
        "schema": 1,
        "imported_from": str(folder),
        "step": step,
        "steps_trained": origin.get("steps_trained"),
        "draft": draft.config.model_type,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "target": facts.to_dict(),
        "data_fingerprint": origin.get("data_fingerprint"),
        "validation": origin.get("validation"),
    }
