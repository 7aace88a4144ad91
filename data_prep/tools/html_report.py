"""The HTML report of a dataset, as one file: images, tokens colored by whether they are supervised, histograms.

Does not own: the statistics (data_prep.tools.stats).
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Container
from html import escape
from typing import Any

import numpy as np

from data_prep.chat import Example
from data_prep.conversation import Conversation, media_parts
from data_prep.tools.stats import HEAD, MEASURES, NO_FAMILY, Statistics, format_number
from sage.inputs.media import open_image, open_video_part
from sage.inputs.processing import Processor
from sage.io.tables import counted

THUMBNAIL_SIDE = 224  # pixels
NUM_FRAMES = 4  # shown per video
NUM_BINS = 24
STYLE = """
:root { --ink: #1b1f24; --soft: #667085; --line: #d8dde4; --back: #ffffff; --card: #f7f8fa; --yes: #b7e4c7; --bar: #4c8df6; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e6e9ee; --soft: #97a1b0; --line: #343b46; --back: #14171c; --card: #1c2027; --yes: #1f5a3a; --bar: #6ea4ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 24px 16px 64px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 12px; }
p, small { color: var(--soft); margin: 0 0 12px; }
table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; white-space: nowrap; } th { color: var(--soft); font-weight: 500; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 16px; }
.chart, .example { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.chart b { font-weight: 600; font-size: 13px; } .chart svg { width: 100%; height: 130px; display: block; }
.chart rect { fill: var(--bar); } .chart text { fill: var(--soft); font-size: 11px; }
.wide { overflow-x: auto; }
@media (max-width: 600px) { .wide table { font-size: 12px; } .wide td, .wide th { padding: 3px 7px 3px 0; }
  .wide td:first-child { white-space: normal; } }
.tables { display: flex; flex-wrap: wrap; gap: 0 56px; }
.example { margin: 0 0 16px; } .head { display: flex; flex-wrap: wrap; gap: 4px 16px; color: var(--soft); font-size: 13px; }
.head b { color: var(--ink); } .media { display: flex; flex-wrap: wrap; gap: 8px; margin: 10px 0; }
.media img { max-width: 100%; height: auto; border-radius: 4px; border: 1px solid var(--line); image-rendering: auto; }
.video { display: flex; flex-wrap: wrap; gap: 2px; }
.tokens { font: 13px/1.9 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens span { border-bottom: 1px solid var(--line); margin-right: 1px; padding: 1px 0; }
.tokens .y { background: var(--yes); border-radius: 2px; }
.tokens .v { background: var(--line); border-radius: 8px; padding: 1px 7px; border: 0; color: var(--soft);
  white-space: nowrap; }
.legend span { color: var(--ink); padding: 1px 6px; border-radius: 3px; } .legend .y { background: var(--yes); }
.legend .v { background: var(--line); border-radius: 8px; }
"""


def render_html(title: str, statistics: Statistics, shown: list[tuple[Conversation, Example]], processor: Processor) -> str:
    """Returns the report as HTML, with the examples `shown`."""
    varying = {name: label for name, label in MEASURES.items() if len(set(statistics.values[name])) > 1}
    charts = "".join(_histogram(label, statistics.values[name]) for name, label in varying.items())
    examples = "".join(_example(conversation, example, processor) for conversation, example in shown)
    legend = (
        '<p class="legend">The draft learns to predict the <span class="y">supervised</span> tokens; the others are '
        'context. <span class="v">image &times; n</span> is an image of n visual tokens.</p>'
    )
    long = f"; {escape(statistics.long.line())}" if statistics.long else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{statistics.headline}, "
        f"{sum(statistics.skipped.values())} invalid items skipped{long}</p>"
        f"<h2>Distributions</h2>{_constants(statistics, varying)}"
        f'<div class="charts">{charts}</div>'
        f"<h2>Numbers</h2>{_numbers(statistics)}{_counts(statistics)}"
        f"<h2>Examples</h2>{legend}{examples}</body></html>\n"
    )


def _constants(statistics: Statistics, varying: Container[str]) -> str:
    """Returns the measures with the same value in every example, as a sentence."""
    same = [f"{label} {format_number(statistics.values[name][0])}" for name, label in MEASURES.items() if name not in varying]
    return f"<p>Equal in all examples: {escape(', '.join(same))}.</p>" if same else ""


def without_folders(text: str) -> str:
    """Returns a text with the folders of absolute paths left out: `/home/me/rows.json` -> `rows.json`."""
    return re.sub(r"(?<![\w.~/])~?/(?:[^\s/'\"()]+/)+(?=[^\s/])", "", text)


def _numbers(statistics: Statistics) -> str:
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in statistics.table_rows())
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _counts(statistics: Statistics) -> str:
    tables, by_reason = "", ("Skipped, by reason", statistics.skipped)
    for title, counts in (("Sources", statistics.sources), ("Families", statistics.families), by_reason):
        if set(counts) - {NO_FAMILY}:
            shown = ((escape(without_folders(name)), count) for name, count in counts.most_common())
            rows = "".join(f"<tr><td>{name}</td><td>{count}</td></tr>" for name, count in shown)
            tables += f"<div><h2>{title}</h2><table>{rows}</table></div>"
    return f'<div class="tables">{tables}</div>'


def _histogram(label: str, values: list[float]) -> str:
    """Returns a bar chart as inline SVG, 320 x 130 units, with the range below and the highest count above."""
    low, high = min(values), max(values)
    is_integer = all(value == int(value) for value in values)
    bins = int(min(NUM_BINS, high - low + 1)) if is_integer else NUM_BINS
    edges = (low - 0.5, high + 0.5) if is_integer else (low, high if high > low else low + 1e-9)
    counts, _ = np.histogram(values, bins=bins, range=edges)
    width, most = 320 / bins, max(1, int(counts.max()))
    bars = "".join(
        f'<rect x="{i * width + 0.5:.1f}" y="{110 - 95 * n / most:.1f}" width="{width - 1:.1f}" height="{95 * n / most:.1f}"/>'
        for i, n in enumerate(counts.tolist())
    )
    return (
        f'<div class="chart"><b>{escape(label)}</b><svg viewBox="0 0 320 130" role="img" aria-label="{escape(label)}">'
        f'{bars}<text x="0" y="124">{low:.3g}</text><text x="320" y="124" text-anchor="end">{high:.3g}</text>'
        f'<text x="320" y="10" text-anchor="end">highest bar: {counted(most, "example")}</text></svg></div>'
    )


def _example(conversation: Conversation, example: Example, processor: Processor) -> str:
    visual = processor.family.visual_mask(example["input_ids"])
    facts = {
        "tokens": len(visual),
        "visual": int(visual.sum()),
        "supervised": int(example["loss_mask"].sum()),
        "source": without_folders(conversation.source),
    }
    if conversation.family:
        facts["family"] = conversation.family
    head = "".join(f"<span>{name} {escape(str(value))}</span>" for name, value in facts.items())
    return (
        f'<div class="example"><div class="head"><b>{escape(without_folders(conversation.id))}</b>{head}</div>'
        f'<div class="media">{_media(conversation)}</div>'
        f'<div class="tokens">{_tokens(example, visual.tolist(), processor)}</div></div>'
    )


def _media(conversation: Conversation) -> str:
    shown = ""
    for part in media_parts(conversation.messages):
        if part["type"] == "image":
            shown += _img(part["image"])
        else:
            frames = open_video_part(part, NUM_FRAMES).frames
            shown += f'<div class="video">{"".join(_img(frame, THUMBNAIL_SIDE // 2) for frame in frames)}</div>'
    return shown


def _img(image: Any, side: int = THUMBNAIL_SIDE) -> str:
    small = open_image(image).copy()
    small.thumbnail((2 * side, side))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=88)
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img alt="" width="{small.width}" height="{small.height}" src="data:image/jpeg;base64,{data}">'


def _tokens(example: Example, visual: list[bool], processor: Processor) -> str:
    """Returns one span per token; one span for a run of visual tokens, and for the bytes of one character."""
    ids, mask = example["input_ids"].tolist(), example["loss_mask"].tolist()
    image_id = processor.family.slots.get("image")
    spans, position = [], 0
    while position < len(ids):
        end = position + 1
        if visual[position]:
            while end < len(ids) and ids[end] == ids[position]:
                end += 1
            name = "image" if ids[position] == image_id else "video"
            spans.append(f'<span class="v">{name} &times; {end - position}</span>')
        else:
            text = processor.tokenizer.decode(ids[position:end])
            while "\ufffd" in text and end < min(len(ids), position + 4):
                end += 1
                text = processor.tokenizer.decode(ids[position:end])
            style, shown = ' class="y"' if mask[position] else "", escape(text).replace("\n", "&#9166;\n")
            spans.append(f"<span{style}>{shown}</span>")
        position = end
    return "".join(spans)
