"""`python -m benchmarks.visual_tokens`: what a draft's visual tokens cost at the sizes of a published target, by compressor.

Operations and bytes are counted, in bf16, for an `eagle` head of one layer: those of the first token without the vision tower,
which a draft does not save, and those of a round of `LEVELS` levels. `make results-compressor` measures trained heads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.figures import counts, fill_blocks
from sage.commands.cli import new_parser, run
from sage.drafts.compressor import MODES, Resampler
from sage.io.files import write_text
from sage.io.tables import markdown_table
from train.config.hydra_app import compose
from train.config.schema import Config
from train.plan.memory import MetaModels, build_on_meta, draft_rows

PAGE = Path(__file__).parents[1] / "docs" / "compressor.md"
LEVELS = 5
ITEM_BYTES = 2  # bf16
KINDS = ("none", *MODES)
HEAD = ("`draft/compressor`", "first token", "round")


def models_of(target: str, kind: str) -> MetaModels:
    """Returns a published target and a head with this compressor, without weights."""
    data = ["data=llava_instruct", "data.path=/no/data", "launch.plan=true"]
    return build_on_meta(compose("config", [f"target={target}", "draft=eagle", f"draft/compressor={kind}", *data], Config))


def counted(models: MetaModels, tokens: int) -> tuple[float, float]:
    """Returns the draft's share of the first token's operations, and its cache's share of a round's bytes."""
    target, head = models.target, models.draft.network
    rows, layer = draft_rows(head, tokens, tokens), models.layers_parameters / target.num_layers
    fc = 2 * target.hidden_size**2
    pairs, token = (
        2 * target.text_config.num_attention_heads * target.head_dim,
        2 * target.num_kv_heads * target.head_dim * ITEM_BYTES,
    )
    attended = [part for part in head.modules() if isinstance(part, Resampler)]  # reads all tokens; the others are cheap
    read = sum(proj.weight.numel() for part in attended for proj in (part.k_proj, part.v_proj))
    draft = 2 * (layer + fc) * rows + pairs * rows**2 + 2 * read * tokens
    text = 2 * models.layers_parameters * tokens + target.num_layers * pairs * tokens**2
    own, weights = token * rows, (layer + fc + target.vocab_size * target.hidden_size) * ITEM_BYTES
    total = models.read_parameters * ITEM_BYTES + target.num_layers * token * tokens + LEVELS * (weights + own)
    return draft / (draft + text), LEVELS * own / total


def table(target: str, tokens: list[int]) -> str:
    """Returns a row per compressor, whose cells have the shares in % for each number of tokens."""
    rows = []
    for kind in KINDS:
        models = models_of(target, kind)
        first, cached = zip(*(counted(models, count) for count in tokens), strict=True)
        cells = ((first, "{:.1f}"), (cached, "{:.2f}"))
        rows.append([f"`{kind}`", *("/".join(form.format(100 * share) for share in shares) for shares, form in cells)])
    numbers = "/".join(f"{count:,}" for count in tokens)
    note = f"{numbers} visual tokens: the draft's share in %, counted at {target}; of a round that of its cache"
    return f"{markdown_table(HEAD, rows, '<>>')}\n\n{note}"


def main() -> int:
    parser = new_parser("python -m benchmarks.visual_tokens", description=__doc__)
    parser.add_argument("--tokens", metavar="N,N", default="1024,4096,16384", help="visual tokens; default %(default)s")
    parser.add_argument("--shape", metavar="NAME", default="qwen2_5_vl_7b", help="a target of conf/target; default %(default)s")
    parser.add_argument("--page", action="store_true", help=f"write the table into docs/{PAGE.name}")
    args = parser.parse_args()
    text = table(args.shape, counts(args.tokens))
    print(text)
    if args.page:
        write_text(PAGE, fill_blocks(PAGE.read_text(encoding="utf-8"), "table", lambda _: text))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
