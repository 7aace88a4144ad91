"""`python -m benchmarks.visual_tokens`: what a draft's visual tokens cost at the sizes of a published target, by compressor.

Operations and bytes are counted, in bf16, for an `eagle` head of one layer: those of the first token without the vision tower,
which a draft does not save, and those of a round of `LEVELS` levels; beside them the figures of `benchmarks.large_pictures`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import counts, fill_blocks
from sage.commands.cli import new_parser, run
from sage.drafts.compressor import MODES, Resampler
from sage.io.files import read_json, write_text
from sage.io.tables import markdown_table
from train.config.hydra_app import compose
from train.config.schema import Config
from train.plan.memory import MetaModels, build_on_meta, draft_rows

PAGE = Path(__file__).parents[1] / "docs" / "compressor.md"
FIGURES = PAGE.parent / "results" / "large_pictures.json"  # of benchmarks.large_pictures
LEVELS = 5
ITEM_BYTES = 2  # bf16
KINDS = ("none", *MODES)
HEAD = ("`draft/compressor`", "first token, %", "round, %")
MEASURED = {  # on a pocket target: figure, and its form
    "draft rows": ("rows", "{:.0f}"),
    "tokens/pass": ("tokens_per_pass", "{:.2f}"),
    "first token (pocket)": ("first_token", "{:.2%}"),
    "draft in a round (pocket)": ("round", "{:.0%}"),
}


def config_of(target: str, kind: str) -> Config:
    data = ["data=llava_instruct", "data.path=/no/data", "launch.plan=true", "optim.schedule=cosine"]
    return compose("config", [f"target={target}", "draft=eagle", f"draft/compressor={kind}", *data], Config)


def models_of(target: str, kind: str) -> MetaModels:
    """Returns a published target and a head with this compressor, without weights."""
    return build_on_meta(config_of(target, kind))


def counted(models: MetaModels, tokens: int) -> tuple[float, float]:
    """Returns the draft's share of the first token's operations, and its cache's share of a round's bytes.

    Of a prompt, a head of one layer computes keys and values alone (`sage.drafts.layer.LastQuery`).
    """
    target, head = models.target, models.draft.network
    rows, layer = draft_rows(head, tokens, tokens), models.layers_parameters / target.num_layers
    fc, values = 2 * target.hidden_size**2, 2 * target.num_kv_heads * target.head_dim
    pairs = 2 * target.text_config.num_attention_heads * target.head_dim
    attended = [part for part in head.modules() if isinstance(part, Resampler)]  # reads all tokens; the others are cheap
    read = sum(proj.weight.numel() for part in attended for proj in (part.k_proj, part.v_proj))
    draft = 2 * (fc + target.hidden_size * values) * rows + 2 * read * tokens
    text = 2 * models.layers_parameters * tokens + target.num_layers * pairs * tokens**2
    own, weights = values * ITEM_BYTES * rows, (layer + fc + target.vocab_size * target.hidden_size) * ITEM_BYTES
    total = models.read_parameters * ITEM_BYTES + target.num_layers * values * ITEM_BYTES * tokens + LEVELS * (weights + own)
    return draft / (draft + text), LEVELS * own / total


def table(target: str, tokens: list[int], measured: Mapping[str, Any]) -> str:
    """Returns a row per compressor, whose cells have the figures for each number of tokens, as far as they are measured."""
    rows, sizes = [], {count: measured[str(count)] for count in tokens if str(count) in measured}
    for kind in KINDS:
        models = models_of(target, kind)
        shares = zip(*(counted(models, count) for count in tokens), strict=True)
        cells = [[f"{100 * share:.2f}" for share in each] for each in shares]
        heads = [size["heads"][kind] for size in sizes.values() if kind in size["heads"]]
        for name, form in MEASURED.values():
            cells.append([form.format(head[name]) for head in heads])
        rows.append([f"`{kind}`", *map("/".join, cells)])
    numbers = "/".join(f"{count:,}" for count in tokens)
    note = f"{numbers} visual tokens: the draft's share counted at {target}, of a round that of its cache"
    for count, size in sizes.items():
        note += f"; {count:,}: {size['answers']} answers, {size['right']:.0%} of facts right"
    return f"{markdown_table((*HEAD, *MEASURED), rows, '<>>' + '>' * len(MEASURED))}\n\n{note}"


def main() -> int:
    parser = new_parser("python -m benchmarks.visual_tokens", description=__doc__)
    parser.add_argument("--tokens", metavar="N,N", default="1024,4096,16384", help="visual tokens; default %(default)s")
    parser.add_argument("--shape", metavar="NAME", default="qwen2_5_vl_7b", help="a target of conf/target; default %(default)s")
    parser.add_argument("--page", action="store_true", help=f"write the table into docs/{PAGE.name}")
    args = parser.parse_args()
    text = table(args.shape, counts(args.tokens), read_json(FIGURES) if FIGURES.is_file() else {})
    print(text)
    if args.page:
        write_text(PAGE, fill_blocks(PAGE.read_text(encoding="utf-8"), "table", lambda _: text))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
