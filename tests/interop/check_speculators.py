"""Tests our exports against the PyPI package `speculators`: `make interop` builds the environment and runs this script.

For each target, new drafts with the full and with a reduced vocabulary are exported as `speculators` and as `eagle3`:

1. the package's classes accept the config;
2. its model misses exactly the two tensors of the verifier and finds none unexpected;
3. its converter turns our `eagle3` export into our `speculators` export, bit for bit;
4. its forward pass yields our logits on a fixed batch. Both compute in float32 with the export's bf16 weights; they differ in
   the attention kernel (eager or sdpa), hence in the order of sums over at most a few thousand terms: 1e-4 of the largest
   logit is allowed, observed are about 1e-6;
5. negative control: without lm_head, and with one tensor too many, the package and our validator must report an error.

    python tests/interop/check_speculators.py [--targets DIR DIR] [--shape-7b]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from loguru import logger as package_logger
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.convert import convert_model
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig
from transformers.utils import logging as transformers_logging

import sage
from checkpoints.export.exporter import ExportOptions, export
from checkpoints.export.importer import check_folder, read_draft
from checkpoints.export.target import TargetFacts
from sage.drafts.eagle import Eagle3Config, Eagle3Draft, default_levels

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "data_prep" / "pocket" / "targets"
VERIFIERS_OWN = {"verifier_lm_head.weight", "verifier_norm.weight"}
TOLERANCE = 1e-4
TOKENS, SEED = 12, 0


def main() -> int:
    """Runs every check; returns 0 if all pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [POCKET / "pocket_qwen2_5_vl", POCKET / "pocket_llava_onevision"]
    text = "target folders; default: Qwen2.5-VL's and LLaVA-OneVision's pocket targets"
    parser.add_argument("--targets", nargs="*", type=Path, default=default, help=text)
    text = "also a draft of the exact shape of Qwen2.5-VL-7B (15 GB of memory)"
    parser.add_argument("--shape-7b", action="store_true", help=text)
    args = parser.parse_args()
    silence()
    for folder in args.targets:
        target = sage.Target(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32))
        for share in (None, 3):
            ids = None if share is None else torch.arange(0, target.vocab_size, share)
            draft = noisy(sage.new_draft(target, "eagle3", seed=1, vocabulary=ids, feature_levels=levels_of(target)))
            what = "full" if share is None else f"{len(ids)} of {target.vocab_size}"
            run_case(f"{folder.name}, vocabulary {what}", draft, folder)
        draft.config.norm_before_residual = draft.midlayer.norm_before_residual = True  # the default of speculators' trainer
        run_case(f"{folder.name}, norm_before_residual", draft, folder)
        norms = {"fc_norm": True, "norm_output": True}
        draft = noisy(sage.new_draft(target, "eagle3", seed=1, feature_levels=levels_of(target), **norms))
        run_case(f"{folder.name}, EAGLE-3.1", draft, folder)
    if args.shape_7b:
        with shape_of_7b() as (draft, folder):
            run_case("shape of Qwen2.5-VL-7B, vocabulary 32000 of 152064", draft, folder)
    print("interop: all checks pass")
    return 0


def silence() -> None:
    """Leaves out what the packages print."""
    package_logger.remove()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def levels_of(target: sage.Target) -> list[int]:
    """Returns the engines' default levels, or three valid ones for a target with too few layers."""
    count = target.num_layers
    return default_levels(count) if count >= 7 else [1, count // 2, count - 1]


def run_case(name: str, draft: Eagle3Draft, target: Path) -> None:
    """Runs all checks for one draft."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draft.save_pretrained(folder / "draft")
        # `eagle3` cannot express norm_before_residual, and the package's converter drops the norms of EAGLE-3.1.
        is_converted = not draft.config.norm_before_residual and not draft.config.fc_norm
        formats = ("speculators", "eagle3") if is_converted else ("speculators",)
        for format_ in formats:
            export(folder / "draft", folder / format_, format_, ExportOptions(target=str(target), allow_unserved=True))
        model = load_by_package(folder / "speculators", set())
        load_by_package(without(folder / "speculators", folder / "slim", "embed_tokens.weight"), {"embed_tokens.weight"})
        if "eagle3" in formats:
            compare_conversion(folder, target)
        gap = compare_logits(model, read_draft(folder / "speculators", TargetFacts.of_folder(target)))
        refuse_invalid(folder)
    spent = time.monotonic() - start
    print(f"{name}: config, tensors, conversion, logits (largest relative difference {gap:.1e}); {spent:.0f} s", flush=True)


def noisy(draft: Any, size: float = 0.02) -> Any:
    """Adds noise to every tensor, so that none keeps its initial values."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return draft


def load_by_package(folder: Path, also_missing: set[str]) -> Eagle3DraftModel:
    """Checks 1 and 2."""
    config = SpeculatorModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    expect(type(config).__name__, "Eagle3SpeculatorConfig", "the class of the config")
    config.transformer_layer_config._attn_implementation = "eager"
    with default_dtype(torch.bfloat16):
        model = Eagle3DraftModel(config)
    found = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    expect(set(found.missing_keys), VERIFIERS_OWN | also_missing, "missing tensors")
    expect(list(found.unexpected_keys), [], "unexpected tensors")
    return model


def compare_conversion(folder: Path, target: Path) -> None:
    """Check 3."""
    convert_model(model=str(folder / "eagle3"), verifier=str(target), algorithm="eagle3", output_path=str(folder / "converted"))
    theirs, ours = (load_file(folder / name / "model.safetensors") for name in ("converted", "speculators"))
    ours.pop("embed_tokens.weight")
    theirs.pop("embed_tokens.weight", None)
    expect(set(theirs), set(ours), "names of converted tensors")
    for name, tensor in ours.items():
        expect((theirs[name].dtype, torch.equal(theirs[name], tensor)), (tensor.dtype, True), f"converted {name}")


@torch.no_grad()
def compare_logits(model: Eagle3DraftModel, draft: Any) -> float:
    """Check 4: the largest difference, relative to the largest logit."""
    model, draft = model.float().eval(), draft.float().eval()
    generator = torch.Generator().manual_seed(SEED)
    size = draft.config.hidden_size
    levels = torch.randn(1, TOKENS, 3 * size, generator=generator)
    ids = torch.randint(0, draft.config.vocab_size, (1, TOKENS), generator=generator)
    positions = torch.arange(5, 5 + TOKENS)[None]
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, out: seen.append(out))
    model(levels, ids, torch.zeros(1, TOKENS, dtype=torch.long), position_ids=positions, ttt_steps=1)
    hook.remove()
    on_axes = positions.expand(3, 1, TOKENS) if draft.config.mrope_section else positions
    hidden = draft(model.embed_tokens(ids), draft.combine(levels), on_axes)
    ours = draft.lm_head(draft.to_lm_head(hidden))
    return relative_gap(seen[0], ours)


def relative_gap(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Returns the largest difference of logits, relative to the largest one; raises AssertionError beyond `TOLERANCE`."""
    gap = float((theirs - ours).abs().max() / ours.abs().max())
    if not gap < TOLERANCE:
        raise AssertionError(f"logits differ by {gap:.2e} of the largest one, allowed are {TOLERANCE:.0e}")
    return gap


def refuse_invalid(folder: Path) -> None:
    """Check 5."""
    lost = without(folder / "speculators", folder / "lost", "lm_head.weight")
    more = without(folder / "speculators", folder / "more", "", {"layers.0.self_attn.q_norm.weight": torch.ones(4)})
    for broken in (lost, more):
        try:
            load_by_package(broken, set())
        except AssertionError:
            expect(bool(check_folder(broken).errors), True, f"our validator on {broken.name}")
        else:
            raise AssertionError(f"the package accepted {broken.name}: this check cannot fail")


def without(source: Path, out: Path, name: str, extra: dict[str, torch.Tensor] | None = None) -> Path:
    """Copies an export without one tensor or with additional ones, and without its manifest."""
    out.mkdir()
    tensors = {key: value for key, value in load_file(source / "model.safetensors").items() if key != name}
    save_file({**tensors, **(extra or {})}, out / "model.safetensors")
    (out / "config.json").write_text((source / "config.json").read_text())
    return out


@contextmanager
def shape_of_7b() -> Iterator[tuple[Eagle3Draft, Path]]:
    """Yields a random draft for Qwen2.5-VL-7B, and a folder with that target's config and a random embedding."""
    config = Qwen2_5_VLConfig(text_config=SHAPE_7B, architectures=["Qwen2_5_VLForConditionalGeneration"])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config.save_pretrained(folder)
        facts = TargetFacts.of_folder(folder)
        with default_dtype(torch.bfloat16):
            table = torch.randn(facts.vocab_size, facts.hidden_size) * 0.02
            save_file({"model.language_model.embed_tokens.weight": table}, folder / "model.safetensors")
            draft = Eagle3Draft(config_for_7b(facts))
        for module in draft.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.02)
        draft.set_vocabulary(torch.randperm(facts.vocab_size, generator=torch.Generator().manual_seed(1))[:32000].sort().values)
        yield noisy(draft), folder


SHAPE_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}


def config_for_7b(facts: TargetFacts) -> Eagle3Config:
    """Returns our config at that shape, as `sage.new_draft` derives it."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return Eagle3Config(
        **{key: SHAPE_7B[key] for key in sizes},
        head_dim=128,
        max_position_embeddings=facts.max_position_embeddings,
        rope_theta=facts.rope_theta,
        mrope_section=facts.mrope_section,
        feature_levels=default_levels(facts.num_layers),
        draft_vocab_size=32000,
        target=facts.fingerprint,
        target_path=facts.name,
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets the default dtype within the block, which halves the memory of a draft of the 7B shape."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def expect(found: object, wanted: object, what: str) -> None:
    """Raises AssertionError with both values unless they are equal."""
    if found != wanted:
        raise AssertionError(f"{what}: found {found}, expected {wanted}")


if __name__ == "__main__":
    sys.exit(main())
