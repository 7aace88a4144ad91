"""Tests our exports against the PyPI package `speculators`: `make interop` builds the environment and runs this script.

For each of two targets, new drafts with the full and with a reduced vocabulary are exported as `speculators` and as `eagle3`:

1. the package's classes accept the config;
2. its model misses exactly the two tensors of the verifier and finds none unexpected;
3. its converter turns our `eagle3` export into our `speculators` export, bit for bit;
4. its forward pass yields our logits on a fixed batch. Both compute in float32 with the export's bf16 weights; they differ in
   the attention kernel (eager or sdpa), hence in the order of sums over at most a few thousand terms: 1e-4 of the largest
   logit is allowed, observed are about 1e-6;
5. negative control: without lm_head, and with one tensor too many, the package and our validator must report an error.

New drafts for the pocket Qwen2.5-VL are exported as `dflash`, `dspark` and `peagle`, too. The package's class accepts the
config, finds every tensor that it does not take from the verifier and no other one, and its layers yield the logits of our
draft: of one block behind a context, or of pairs and masked inputs behind them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from loguru import logger as package_logger
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.convert import convert_model
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.peagle import PEagleDraftModel
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

import sage
from checkpoints.export.exporter import ExportOptions, export
from checkpoints.export.importer import check_folder, read_draft
from checkpoints.export.target import TargetFacts
from sage.drafts.eagle import Eagle3Draft, default_levels

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "data_prep" / "pocket" / "targets"
QWEN = POCKET / "pocket_qwen2_5_vl"
VERIFIERS_OWN = {"verifier_lm_head.weight", "verifier_norm.weight"}
TOLERANCE = 1e-4
TOKENS, SLOTS, MASK, SEED = 12, 4, 1029, 0
BLOCK = {"feature_levels": [2, 6, 10], "feed": False, "block_size": SLOTS, "num_layers": 2, "mask_token": MASK}
MARKOV = {"conditional": "markov", "conditional_rank": 16, "confidence": True}
PEAGLE = {"block_size": SLOTS, "num_layers": 2, "mask_token": MASK, "image_inputs": "token"}
ONE_PASS: dict[str, tuple[str, dict[str, Any], Any]] = {  # format -> kind of draft, its options, the package's class
    "dflash": ("block", BLOCK | {"conditional": "none"}, DFlashDraftModel),
    "dspark": ("block", BLOCK | MARKOV, DSparkDraftModel),
    "peagle": ("peagle", PEAGLE, PEagleDraftModel),
}


def main() -> int:
    """Runs every check; returns 0 if all pass."""
    package_logger.remove()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for folder in (QWEN, POCKET / "pocket_llava_onevision"):
        target = sage.Target(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32))
        for share in (None, 3):
            ids = None if share is None else torch.arange(0, target.vocab_size, share)
            draft = noisy(
                sage.new_draft(target, "eagle3", seed=1, vocabulary=ids, feature_levels=default_levels(target.num_layers))
            )
            what = "full" if share is None else f"{len(ids)} of {target.vocab_size}"
            run_case(f"{folder.name}, vocabulary {what}", draft, folder)
        draft.config.norm_before_residual = draft.midlayer.norm_before_residual = True  # the default of speculators' trainer
        run_case(f"{folder.name}, norm_before_residual", draft, folder)
        norms = {"fc_norm": True, "norm_output": True}
        draft = noisy(sage.new_draft(target, "eagle3", seed=1, feature_levels=default_levels(target.num_layers), **norms))
        run_case(f"{folder.name}, EAGLE-3.1", draft, folder)
    target = sage.Target(AutoModelForImageTextToText.from_pretrained(QWEN, dtype=torch.float32))
    for name in ONE_PASS:
        for ids in (None, torch.arange(0, target.vocab_size, 3)):
            gap = run_one_pass(name, target, ids)
            what = "full" if ids is None else f"{len(ids)} of {target.vocab_size}"
            print(f"{name}, vocabulary {what}: config, tensors, logits (largest difference {gap:.1e})", flush=True)
    print("interop: all checks pass")
    return 0


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


def expect(found: object, wanted: object, what: str) -> None:
    """Raises AssertionError with both values unless they are equal."""
    if found != wanted:
        raise AssertionError(f"{what}: found {found}, expected {wanted}")


# -- drafts that predict a block in one pass ------------------------------------------------------------------------------


@torch.no_grad()
def run_one_pass(name: str, target: sage.Target, ids: torch.Tensor | None) -> float:
    """Exports a new draft, loads it with the package and compares logits; returns their largest relative difference."""
    kind, options, model_class = ONE_PASS[name]
    draft = noisy(sage.new_draft(target, kind, seed=1, vocabulary=ids, **options), 0.05)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draft.save_pretrained(folder / "draft")
        export(folder / "draft", folder / "out", name, ExportOptions(target=str(QWEN), dtype=torch.float32))
        config = SpeculatorModelConfig.from_dict(json.loads((folder / "out" / "config.json").read_text()))
        config.transformer_layer_config._attn_implementation = "eager"
        model = model_class(config).float().eval()
        tensors = load_file(folder / "out" / "model.safetensors")
        found = model.load_state_dict(tensors, strict=False)
        own = VERIFIERS_OWN | ({"embed_tokens.weight", "lm_head.weight"} - set(tensors))
        expect(set(found.missing_keys) - own, set(), "missing tensors")
        expect(list(found.unexpected_keys), [], "unexpected tensors")
        back: Any = read_draft(folder / "out", TargetFacts.of_folder(QWEN))
    if "embed_tokens.weight" not in tensors:
        model.embed_tokens.weight.copy_(target.embed_tokens.weight)
    if "lm_head.weight" not in tensors:
        model.lm_head.weight.copy_(target.lm_head.weight)
    back.borrow(target)
    theirs, ours = compare_pairs(model, back, target) if kind == "peagle" else compare_blocks(model, back, target)
    return relative_gap(theirs, ours)


def compare_blocks(model: Any, draft: Any, target: sage.Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of the slots that predict, of one block behind `TOKENS` tokens: the package's and ours."""
    levels, ids = inputs(draft)
    anchor = ids[:, -1:]
    filled = torch.cat((anchor, torch.full((1, SLOTS - 1), model.config.mask_token_id)), 1)
    context = model.hidden_norm(model.fc(levels[:, :TOKENS]))
    places = torch.arange(TOKENS + SLOTS)[None]
    rope = model.rotary_emb(context, places)
    hidden = model.embed_tokens(filled)
    for layer in model.layers:
        hidden = layer(
            hidden_states=hidden, target_hidden=context, attention_mask=None, position_ids=places, position_embeddings=rope
        )
    logits = model.lm_head(model.norm(hidden))[0]
    root = torch.tensor([[TOKENS]])
    fused = draft.hidden_norm(draft.fc(levels[:, :TOKENS]))
    ours = draft.read_blocks(fused, root, target.embed_tokens(anchor), [1] * draft.num_levels)[0]
    rows = target.lm_head.weight if draft.token_map is None else target.lm_head.weight[draft.token_map]
    own = ours @ rows.T
    if draft.markov_head is not None:
        tokens = ids[:, :SLOTS]
        state = draft.markov_head(tokens[0])
        own = own + draft.markov_head.markov_w2(state)
        normed = model.norm(hidden)
        logits = logits + model.markov_head.block_bias(prev_token_ids=tokens, hidden_states=normed)[0]
        both = torch.cat((normed, model.markov_head.prev_embeddings(tokens)), -1)
        logits = torch.cat((logits, model.confidence_head(both)[0][:, None]), -1)
        own = torch.cat((own, draft.confidence_head(torch.cat((ours, state), -1))[:, None]), -1)
    return logits[SLOTS - draft.num_levels :], own


def compare_pairs(model: Any, draft: Any, target: sage.Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of pairs and of masked inputs behind them: the package's and ours."""
    levels, ids = inputs(draft)
    masks = torch.full((1, SLOTS - 1), model.config.mask_token_id)
    embeds = model.embed_tokens(torch.cat((ids[:, :TOKENS], masks), 1))
    fused = model.fc(torch.cat((levels[:, :TOKENS], model.mask_hidden.expand(1, SLOTS - 1, -1)), 1))
    count = TOKENS + SLOTS - 1
    places = torch.arange(count)[None]
    hidden = torch.cat((embeds, fused), -1)
    rope = model.rotary_emb(hidden, places)
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    for layer in model.layers:
        hidden = layer(hidden, attention_mask=mask, position_ids=places, position_embeddings=rope)
    slot_embeds, slot_features = draft.slots(1, SLOTS - 1)
    own_embeds = torch.cat((target.embed_tokens(ids[:, :TOKENS]), slot_embeds), 1)
    own_fused = torch.cat((draft.fc(levels[:, :TOKENS]), slot_features), 1)
    axes = places.expand(3, 1, count) if draft.config.mrope_section else places
    return model.lm_head(model.norm(hidden))[0], draft.lm_head(draft.norm(draft(own_embeds, own_fused, axes)))[0]


def inputs(draft: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns feature levels [1, T, A * D] and token ids [1, T] of a seeded sequence."""
    generator = torch.Generator().manual_seed(SEED)
    size = len(draft.config.feature_levels) * draft.config.hidden_size
    levels = torch.randn(1, TOKENS + 1, size, generator=generator)
    return levels, torch.randint(0, draft.config.vocab_size, (1, TOKENS + 1), generator=generator)


if __name__ == "__main__":
    sys.exit(main())
