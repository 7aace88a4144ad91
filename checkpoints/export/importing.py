"""EAGLE-3 drafts made elsewhere, turned into ours: SpecForge, AngelSlim, SafeAILab and speculators layouts.

What the trained weights mean must be kept exactly, so whatever our head cannot express is refused by name. What only an
engine would stumble over (its class name, its context length) is no obstacle here; `sage-export --check` reports it.

Owns: the conversion. Does not own: decoding what comes out (sage.load_draft).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.export.facts import TargetFacts, read_json
from checkpoints.export.folder import CONFIG, Weights, read_config
from checkpoints.export.formats.layout import (
    FEATURE_LEVELS,
    LEVELS_KEY,
    Format,
    Head,
    Rope,
    Table,
    default_levels,
    eagle3_table,
    is_ours,
)
from checkpoints.export.formats.speculators import eagle3_name
from checkpoints.export.validator.tensor_checks import find_bad_maps
from checkpoints.export.writing import ABOUT
from sage.drafts import Eagle3Config, Eagle3Draft

PREFIXES = ("model.", "draft_model.", "module.")
HARMLESS = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")  # the target's own
HARMLESS_ENDINGS = ("rotary_emb.inv_freq",)
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read what a foreign folder leaves open.

    Attributes:
        levels: feature levels, where the folder names none or contradicts itself.
        image_inputs: what the draft saw at picture positions in training; None = what an export of ours says, else `embed`.
        use_target_rope: take the target's rope although the folder's config names another.
    """

    levels: tuple[int, ...] | None = None
    image_inputs: str | None = None
    use_target_rope: bool = False


def read_eagle3(folder: Path, facts: TargetFacts, reading: Reading | None = None) -> Eagle3Draft:
    """A foreign EAGLE-3 draft as our own head, in the dtype of its file.

    Args:
        folder: config.json beside model.safetensors, shards, or a pytorch_model.bin of plain tensors.
        facts: of the target it is for.

    Raises:
        ValueError: names the field or tensor that is wrong, missing, or cannot be expressed.
    """
    reading = reading or Reading()
    head = Head(read_config(folder))
    if is_ours(head.config):
        raise ValueError(f"{folder}: a draft as sage saves it already; sage-validate and sage-generate take it as it is")
    if head.format not in (Format.eagle3, Format.speculators):
        found = head.config.get("architectures") or head.config.get("model_type")
        raise ValueError(f"{folder / CONFIG}: {found} is not an EAGLE-3 draft; only those can be imported")
    config = _config(folder, head, facts, reading)
    tensors = _tensors(folder, head, facts)
    draft = Eagle3Draft(config)
    draft.to(tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors)
    return draft.eval()


def _config(folder: Path, head: Head, facts: TargetFacts, reading: Reading) -> Eagle3Config:
    for key in UNSUPPORTED:
        if head.get(key):
            raise ValueError(
                f"{folder}: {head.name(key)} is {head.get(key)}: our EAGLE-3 head has no such part, cannot import it"
            )
    if head.get("num_hidden_layers", 1) != 1 and not _says_target_layers(head, facts):
        raise ValueError(
            f"{folder}: {head.name('num_hidden_layers')} is {head.get('num_hidden_layers')}: our head has one layer"
        )
    for key in ("hidden_size", "vocab_size"):
        if head.size(key) != getattr(facts, key):
            raise ValueError(
                f"{folder}: {head.name(key)} is {head.get(key)}, that of the target ({facts.name or facts.model_type}) is "
                f"{getattr(facts, key)}; give the target it was trained for"
            )
    if eagle3_table(head) is None:
        raise ValueError(f"{folder / CONFIG}: layer sizes are missing; a draft's config needs heads and intermediate_size")
    eps, activation = head.get("rms_norm_eps", 1e-6), head.get("hidden_act", "silu")
    if not isinstance(eps, float) or not 0 < eps < 1 or activation not in ("silu", "gelu", "relu"):
        raise ValueError(f"{folder / CONFIG}: rms_norm_eps {eps!r} or hidden_act {activation!r} is nothing a layer can have")
    rope = _rope(folder, head, facts, reading)
    return Eagle3Config(
        hidden_size=facts.hidden_size,
        intermediate_size=head.size("intermediate_size"),
        num_attention_heads=head.size("num_attention_heads"),
        num_key_value_heads=head.size("num_key_value_heads"),
        head_dim=head.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=head.size("draft_vocab_size") or facts.vocab_size,
        max_position_embeddings=facts.max_position_embeddings,
        rms_norm_eps=eps,
        hidden_act=activation,
        rope_theta=rope.theta,
        mrope_section=rope.section,
        scaled_rope=rope.scaled,
        norm_before_residual=_norm_before_residual(folder, head),
        feature_levels=_levels(folder, head, facts, reading),
        image_inputs=reading.image_inputs or _about(folder).get("image_inputs") or "embed",
        target=facts.fingerprint,
        target_path=facts.name,
    )


def _norm_before_residual(folder: Path, head: Head) -> bool:
    value = head.config.get("norm_before_residual", False)
    if head.format == Format.speculators and "norm_before_residual" not in head.config:
        raise ValueError(
            f"{folder / CONFIG}: norm_before_residual is missing: engines assume true, others false; write down which it was "
            f"trained with"
        )
    return bool(value)


def _says_target_layers(head: Head, facts: TargetFacts) -> bool:
    """Some trainers copy the target's layer count into the draft's config; the tensors then still have one layer."""
    return head.get("num_hidden_layers") == facts.num_layers


def _rope(folder: Path, head: Head, facts: TargetFacts, reading: Reading) -> Rope:
    rope = head.rope
    if reading.use_target_rope:
        return Rope(facts.rope_theta, facts.mrope_section, facts.scaled_rope)
    if not rope.theta > 0:
        raise ValueError(f"{folder}: {head.name('rope_theta')} is no positive number")
    if rope.scaled != facts.scaled_rope or rope.section != facts.mrope_section:
        raise ValueError(
            f"{folder}: {head.name('rope_scaling')} is {rope.scaled or 'plain'} with mrope_section {rope.section}, the "
            f"target's is {facts.scaled_rope or 'plain'} with {facts.mrope_section}; positions cannot be read as in training "
            f"(--use-target-rope reads them anyway)"
        )
    return rope


def _levels(folder: Path, head: Head, facts: TargetFacts, reading: Reading) -> list[int]:
    vllm, sglang = head.levels_vllm, head.levels_sglang
    if reading.levels:
        levels = list(reading.levels)
    elif vllm and sglang and vllm != sglang:
        raise ValueError(
            f"{folder / CONFIG}: {LEVELS_KEY} means hidden_states{vllm} to vLLM and, in eagle_config, hidden_states{sglang} to "
            f"SGLang; say which it was trained with: --levels A,B,C"
        )
    else:
        levels = vllm or sglang or default_levels(facts.num_layers)
    is_whole = all(isinstance(level, int) for level in levels)
    rises = is_whole and all(later > earlier for earlier, later in zip(levels, levels[1:], strict=False))
    if len(levels) != FEATURE_LEVELS or not rises or levels[0] < 0 or levels[-1] >= facts.num_layers:
        raise ValueError(
            f"{folder}: feature levels {levels}: need three rising ones of 0..{facts.num_layers - 1}; give --levels A,B,C"
        )
    return levels


def _tensors(folder: Path, head: Head, facts: TargetFacts) -> dict[str, Tensor]:
    """The folder's tensors under our names, complete and nothing else."""
    weights = Weights(folder)
    written = eagle3_table(head)
    assert written is not None
    table = {eagle3_name(name): expected for name, expected in written.items()}
    names = {name: _our_name(name) for name in weights.infos}
    wanted = {theirs: ours for theirs, ours in names.items() if not _is_harmless(ours)}
    _refuse_odd(folder, wanted, table)
    tensors = {ours: weights[theirs] for theirs, ours in wanted.items()}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != table[name].shape:
            raise ValueError(f"{folder}: {name} has shape {list(tensor.shape)}, its config means {list(table[name].shape)}")
    return _with_maps(folder, tensors, table, facts.vocab_size)


def _our_name(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return eagle3_name(name)


def _is_harmless(name: str) -> bool:
    return name in HARMLESS or name.endswith(HARMLESS_ENDINGS)


def _refuse_odd(folder: Path, wanted: dict[str, str], table: Table) -> None:
    missing = [name for name, expected in table.items() if not expected.is_optional and name not in wanted.values()]
    unknown = sorted(theirs for theirs, ours in wanted.items() if ours not in table)
    if missing:
        raise ValueError(f"{folder}: {', '.join(missing)}: missing; without it the draft is not what was trained")
    if unknown:
        raise ValueError(f"{folder}: {', '.join(unknown)}: our EAGLE-3 head has no place for it, cannot import this draft")


def _with_maps(folder: Path, tensors: dict[str, Tensor], table: Table, vocab: int) -> dict[str, Tensor]:
    """d2t and t2d as our head keeps them: always there, t2d derived where the folder leaves it out."""
    d2t = tensors.get("d2t", torch.zeros(table["d2t"].shape, dtype=torch.int64)).to(torch.int64)
    reached = torch.zeros(vocab, dtype=torch.bool)
    if problem := find_bad_maps(d2t, tensors.get("t2d"), vocab):
        raise ValueError(f"{folder}: {problem.where}: {problem.found}; {problem.effect}")
    reached[torch.arange(len(d2t)) + d2t] = True
    return {**tensors, "d2t": d2t, "t2d": reached}


def _about(folder: Path) -> dict[str, Any]:
    return read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}
