"""Tests our exports of one-pass drafts against the PyPI package `speculators`: `make interop` runs this too.

New drafts for the pocket Qwen2.5-VL are exported as `dflash`, `dspark` and `peagle`, each with the full and with a reduced
vocabulary. For each, the package's class accepts the config, finds every tensor that it does not take from the verifier and no
other one, and its layers yield the logits of our draft: of one block behind a context, or of pairs and masked inputs behind
them. Both compute in float32, with different attention kernels: `TOLERANCE` of the largest logit is allowed.

    python tests/interop/check_one_pass.py
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from check_speculators import expect, noisy, relative_gap, silence
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.peagle import PEagleDraftModel
from transformers import AutoModelForImageTextToText

import sage
from checkpoints.export.exporter import ExportOptions, export
from checkpoints.export.importer import read_draft
from checkpoints.export.target import TargetFacts

TARGET = Path(__file__).resolve().parents[2] / "data_prep" / "pocket" / "targets" / "pocket_qwen2_5_vl"
VERIFIERS_OWN = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
CONTEXT, SLOTS, MASK, SEED = 12, 4, 1029, 0
BLOCK = {"feature_levels": [2, 6, 10], "feed": False, "block_size": SLOTS, "num_layers": 2, "mask_token": MASK}
MARKOV = {"conditional": "markov", "conditional_rank": 16, "confidence": True}
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "dflash": ("block", BLOCK | {"conditional": "none"}, DFlashDraftModel),
    "dspark": ("block", BLOCK | MARKOV, DSparkDraftModel),
    "peagle": ("peagle", {"block_size": SLOTS, "num_layers": 2, "mask_token": MASK, "image_inputs": "token"}, PEagleDraftModel),
}


def main() -> int:
    """Runs every check; returns 0 if all pass."""
    silence()
    target = sage.Target(AutoModelForImageTextToText.from_pretrained(TARGET, dtype=torch.float32))
    for name in CASES:
        for share in (None, 3):
            ids = None if share is None else torch.arange(0, target.vocab_size, share)
            begin = time.monotonic()
            gap = run_case(name, target, ids)
            what = "full" if ids is None else f"{len(ids)} of {target.vocab_size}"
            spent = f"{time.monotonic() - begin:.0f} s"
            print(f"{name}, vocabulary {what}: config, tensors, logits (largest difference {gap:.1e}); {spent}", flush=True)
    print("one pass: all checks pass")
    return 0


@torch.no_grad()
def run_case(name: str, target: sage.Target, ids: torch.Tensor | None) -> float:
    """Exports a new draft, loads it with the package and compares logits; returns their largest relative difference."""
    kind, options, model_class = CASES[name]
    draft = noisy(sage.new_draft(target, kind, seed=1, vocabulary=ids, **options), 0.05)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draft.save_pretrained(folder / "draft")
        export(folder / "draft", folder / "out", name, ExportOptions(target=str(TARGET), dtype=torch.float32))
        config = SpeculatorModelConfig.from_dict(json.loads((folder / "out" / "config.json").read_text()))
        config.transformer_layer_config._attn_implementation = "eager"
        model = model_class(config).float().eval()
        tensors = load_file(folder / "out" / "model.safetensors")
        found = model.load_state_dict(tensors, strict=False)
        own = VERIFIERS_OWN | (set() if "lm_head.weight" in tensors else {"lm_head.weight"})
        expect(set(found.missing_keys) - own, set(), "missing tensors")
        expect(list(found.unexpected_keys), [], "unexpected tensors")
        back: Any = read_draft(folder / "out", TargetFacts.of_folder(TARGET))
    if "embed_tokens.weight" not in tensors:
        model.embed_tokens.weight.copy_(target.embed_tokens.weight)
    if "lm_head.weight" not in tensors:
        model.lm_head.weight.copy_(target.lm_head.weight)
    back.borrow(target)
    theirs, ours = compare_pairs(model, back, target) if kind == "peagle" else compare_blocks(model, back, target)
    return relative_gap(theirs, ours)


def compare_blocks(model: Any, draft: Any, target: sage.Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of the slots that predict, of one block behind `CONTEXT` tokens: the package's and ours."""
    levels, ids = inputs(draft)
    anchor = ids[:, -1:]
    filled = torch.cat((anchor, torch.full((1, SLOTS - 1), model.config.mask_token_id)), 1)
    context = model.hidden_norm(model.fc(levels[:, :CONTEXT]))
    places = torch.arange(CONTEXT + SLOTS)[None]
    rope = model.rotary_emb(context, places)
    hidden = model.embed_tokens(filled)
    for layer in model.layers:
        hidden = layer(
            hidden_states=hidden, target_hidden=context, attention_mask=None, position_ids=places, position_embeddings=rope
        )
    logits = model.lm_head(model.norm(hidden))[0]
    root = torch.tensor([[CONTEXT]])
    fused = draft.hidden_norm(draft.fc(levels[:, :CONTEXT]))
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
    embeds = model.embed_tokens(torch.cat((ids[:, :CONTEXT], masks), 1))
    fused = model.fc(torch.cat((levels[:, :CONTEXT], model.mask_hidden.expand(1, SLOTS - 1, -1)), 1))
    count = CONTEXT + SLOTS - 1
    places = torch.arange(count)[None]
    hidden = torch.cat((embeds, fused), -1)
    rope = model.rotary_emb(hidden, places)
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    for layer in model.layers:
        hidden = layer(hidden, attention_mask=mask, position_ids=places, position_embeddings=rope)
    slot_embeds, slot_features = draft.slots(1, SLOTS - 1)
    own_embeds = torch.cat((target.embed_tokens(ids[:, :CONTEXT]), slot_embeds), 1)
    own_fused = torch.cat((draft.fc(levels[:, :CONTEXT]), slot_features), 1)
    axes = places.expand(3, 1, count) if draft.config.mrope_section else places
    return model.lm_head(model.norm(hidden))[0], draft.lm_head(draft.norm(draft(own_embeds, own_fused, axes)))[0]


def inputs(draft: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns feature levels [1, T, A * D] and token ids [1, T] of a seeded sequence."""
    generator = torch.Generator().manual_seed(SEED)
    size = len(draft.config.feature_levels) * draft.config.hidden_size
    levels = torch.randn(1, CONTEXT + 1, size, generator=generator)
    return levels, torch.randint(0, draft.config.vocab_size, (1, CONTEXT + 1), generator=generator)


if __name__ == "__main__":
    sys.exit(main())
