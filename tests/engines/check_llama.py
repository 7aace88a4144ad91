"""Serves `gguf` exports with llama.cpp and compares them with our decoder: `make engines-llama` builds it and runs this.

Small random targets have the tokenizer of the published model of `make real`, which the converter knows. Their drafts are
trained on their answers. Served in float32, greedy, with `DEPTH` drafted tokens per round, every prompt must have the same
token ids as under our policy `chain`, up to a tie of the target's two best tokens, and the accepted tokens differ by at most
`TOLERANCE` where the texts are equal. Controls are drafts that are damaged after training; llama.cpp must accept less of them.

Image targets are served with `--mmproj`, with and without a draft. What this llama.cpp cannot serve must stop it with the error
in `STOPS`; once it does not, the formats can name more targets.

    python tests/engines/check_llama.py --llama FOLDER [--only TARGET ..]
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from engine_checks import DEPTH, MAX_NEW_TOKENS, answers_to, gap_at_difference, questions, train
from layouts import CONVERTED, FILES, Layout, save_layout
from PIL import Image

import sage
from benchmarks.engines.llama import DRAFT_IN_FLOAT32, DRAFTED, IN_FLOAT32, MARKER, Llama
from data_prep.real import build_target as build_published
from sage.bench.measurement import BenchPrompt
from sage.io.machine import available_cores
from sage.io.tables import markdown_table
from train.serve_check.acceptance import Answers, decode_chain
from train.serve_check.vllm_process import write_prompts

TRAIN_PROMPTS, NUM_PROMPTS = 32, 8
TOLERANCE = 0.02  # of the accepted tokens
TIE = 1e-3  # difference of the two best logits: which one is chosen depends on the order of sums
AROUND = ("<|vision_start|><|image_pad|><|vision_end|>", "<image>")  # its placeholders; llama.cpp adds what is around it
SPECIALS = {  # of the published tokenizer, unused; ids 3 to 6
    **{"repo_name": "<|image_pad|>", "reponame": "<|video_pad|>"},
    **{"file_sep": "<|vision_start|>", "filename": "<|vision_end|>"},
}
LIMITS = ("--image-min-tokens", "8", "--image-max-tokens", "64")  # llama.cpp does not read those of preprocessor_config.json
SIDES = 224, 190  # pixels; other sides than those of whole patches, of another ratio
QUESTIONS = {"text": "text", "image": "question"}  # of the pocket world, by kind of prompts
BLOCK = {"feed": False, "feature_levels": [2, 4, 6]}
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {  # kind, options
    "eagle3": ("eagle3", {"vocabulary": True}),
    "dflash": ("block", BLOCK | {"conditional": "none", "block_size": DEPTH + 1}),
    "dspark": ("block", BLOCK | {"conditional": "markov", "block_size": DEPTH, "vocabulary": True}),
}
TARGETS = {  # target -> its drafts; one-pass drafts need plain rope
    "scaled": ("eagle3",),
    "plain": ("dflash", "dspark"),
    **dict.fromkeys(("mistral", "qwen3", "qwen3_moe"), ("eagle3",)),
    "smolvlm": ("eagle3", "dflash"),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), ("eagle3", "dflash")),
}
NOT_EXTRACTED, NOT_CONSECUTIVE = "layer input tensor is null", "failed to process speculative batch"
STOPS = {  # target, draft, prompts -> what llama.cpp says
    **{(name, draft, "text"): NOT_EXTRACTED for name in ("qwen2_5_vl", "qwen3_vl") for draft in DRAFTS},
    ("smolvlm", "eagle3", "image"): NOT_CONSECUTIVE,  # its EAGLE-3 skips images, then wants positions without a gap
}
HEAD = ("target", "draft", "prompts", "texts equal, gap of others", "drafted", "accepted by llama.cpp", "by our decoder")


def main() -> int:
    """Builds, trains, exports, serves and compares; returns 0 if all checks pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="folder of `make engines-llama`")
    parser.add_argument("--only", nargs="*", choices=list(TARGETS), default=list(TARGETS), help="only these targets")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only:
            for row in check(Served(name, Path(scratch), Llama(args.llama))):
                print("FAILED" if row.is_wrong else "passed", *row.cells, sep=" | ", flush=True)
                rows.append(row)
    print(markdown_table(list(HEAD), [row.cells for row in rows], "<"))
    failed = any(row.is_wrong for row in rows)
    print("engines-llama: FAILED" if failed else "engines-llama: all checks pass")
    return int(failed)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    cells: list[str]
    is_wrong: bool


@dataclass(frozen=True)
class Prompts:
    """Prompts as our decoder and llama.cpp read them: token ids, or text with `MARKER` and images."""

    kind: str
    ours: list[BenchPrompt]
    sent: list[Any]


class Served:
    """A random target, converted by llama.cpp, and its prompts."""

    def __init__(self, name: str, scratch: Path, llama: Llama) -> None:
        self.name, self.folder, self.llama = name, scratch / name, llama
        self.target = save_target(CONVERTED[name], self.folder / "target")
        self.has_grid = "image_grid_thw" in self.target.family.pixel_keys  # images of patches of any number
        self.options = [*IN_FLOAT32, "--no-warmup", "-m", self.converted()]
        if self.target.family.placeholders:
            self.options += ["--mmproj", self.converted("--mmproj"), *(LIMITS if self.has_grid else ())]

    def converted(self, *options: str) -> str:
        """Returns the target, or its vision tower, as llama.cpp's converter writes it."""
        out = self.folder / f"target{''.join(options)}.gguf"
        return str(self.llama.converted(self.folder / "target", "f32", out, *options))

    def prompts(self, kind: str, change: Callable[[Image.Image], Image.Image] = lambda image: image) -> Prompts:
        """Returns questions, with an image each if `kind` is not `text`, which `change` changes."""
        talks, folder = questions(QUESTIONS[kind.split(",")[0]], "test", NUM_PROMPTS), Path(tempfile.mkdtemp(dir=self.folder))
        for part in (part for talk in talks for part in talk.messages[0]["content"] if part["type"] == "image"):
            part["image"] = change(part["image"])
        ours, file = write_prompts(self.target, talks, folder)
        return Prompts(kind, ours, [self.sent(row) for row in json.loads(file.read_text())])

    def sent(self, row: Mapping[str, Any]) -> Any:
        """Returns a prompt for llama.cpp."""
        if not row["images"]:
            return row["ids"]
        assert self.target.processor is not None
        text = self.target.processor.tokenizer.decode(row["ids"])
        for placeholder in AROUND:
            text = text.replace(placeholder, MARKER)
        images = [base64.b64encode(Path(image).read_bytes()).decode() for image in row["images"]]
        return {"prompt_string": text, "multimodal_data": images}

    def answers(self, prompts: Prompts, draft: Sequence[str] = ()) -> list[dict[str, Any]] | str:
        """Returns llama.cpp's answers; what it says if it stops."""
        log = self.folder / "llama-server.log"
        try:
            with self.llama.serving([*self.options, *draft], log, available_cores()[:1]) as server:
                return [server.ask(prompt, MAX_NEW_TOKENS) for prompt in prompts.sent]
        except (httpx.HTTPError, ValueError) as error:
            found = log.read_text(errors="replace")
            return next((message for message in set(STOPS.values()) if message in found), f"{error}: {found[-800:]}")

    def exported(self, draft: Any, label: str) -> list[str]:
        """Returns the options that serve a draft."""
        draft.save_pretrained(self.folder / label)
        given = self.folder / "target", self.folder / f"{label}_export", torch.float32
        return [*self.llama.exported(self.folder / label, *given), *DRAFT_IN_FLOAT32, DRAFTED, str(DEPTH)]


def check(served: Served) -> Iterator[Row]:
    """Yields the rows of a target."""
    target, kinds = served.target, ["text", *(["image"] if served.target.family.placeholders else [])]
    prompts = [served.prompts(kind) for kind in kinds]
    if len(prompts) > 1:
        yield from check_images(served, prompts)
    is_stopped = (served.name, TARGETS[served.name][0], "text") in STOPS
    count = 1 if is_stopped else TRAIN_PROMPTS // len(kinds)
    asked = [talk for kind in kinds for talk in questions(QUESTIONS[kind], "train", count)]
    examples = answers_to(target, asked, served.folder / "examples")
    for label in TARGETS[served.name]:
        draft = new_draft(target, label, examples)
        if is_stopped:  # no export takes weights that are zero, as some are before training
            [weight.data.normal_(std=0.05) for weight in draft.parameters() if not weight.any()]
        else:
            train(target, draft, DRAFTS[label][0], examples)
        for some in prompts:
            said = served.answers(some, served.exported(draft, label))
            expected = STOPS.get((served.name, label, some.kind))
            if expected is not None:
                yield Row([served.name, label, some.kind, f"stops: {said}", *[""] * 3], said != expected)
                break
            answers = decode_chain(target, sage.load_draft(served.folder / label, target), some.ours, DEPTH, MAX_NEW_TOKENS)
            yield compare(served, label, some, answers, said)
            damages = DAMAGES[label] if served.name in ("scaled", "plain") else DAMAGES[label][-1:]
            for damage in damages if some.kind == "text" else ():  # drafts hardly read those features
                other = copy.deepcopy(draft)
                damage(other)
                said = served.answers(some, served.exported(other, label))
                yield compare(served, f"{label}, {damage.__name__}", some, answers, said, is_control=True)


def check_images(served: Served, prompts: Sequence[Prompts]) -> Iterator[Row]:
    """Yields the rows without a draft: text, images, and where sizes are kept, images that are no whole patches.

    llama.cpp keeps the ratio of their sides and pads with black, the published processor stretches them. Texts must be equal if
    the images are padded before our processor reads them, and not otherwise.
    """
    for some in prompts:
        yield compare(served, "none", some, alone(served.target, some), served.answers(some))
    if not served.has_grid:
        return
    other = served.prompts("image, stretched by ours", lambda image: image.resize(SIDES))
    patch = served.target.processor.image_processor.patch_size  # type: ignore[union-attr]
    _, rows, columns = (other.ours[0].inputs["image_grid_thw"][0] * patch).tolist()
    same = served.prompts("image, padded by ours", lambda image: padded(image.resize(SIDES), (columns, rows)))
    said = served.answers(other)
    yield compare(served, "none", same, alone(served.target, same), said)
    row = compare(served, "none", other, alone(served.target, other), said)
    yield replace(row, is_wrong=not row.is_wrong)


def compare(
    served: Served, label: str, prompts: Prompts, ours: Answers, said: list[dict[str, Any]] | str, is_control: bool = False
) -> Row:
    """Returns the row of a draft; the rounds count where texts are equal, since after a tie they differ."""
    title = [served.name, label, prompts.kind]
    if isinstance(said, str):
        return Row([*title, f"stops: {said}", *[""] * 3], True)
    triples = zip(prompts.ours, ours.tokens, (given["tokens"] for given in said), strict=True)
    gaps = [gap_at_difference(served.target, *triple) for triple in triples]
    texts = f"{gaps.count(None)}/{len(gaps)} {' '.join(f'{gap:.1e}' for gap in gaps if gap is not None)}".strip()
    equal = [place for place, gap in enumerate(gaps) if gap is None]
    counts = [said[place]["timings"] for place in equal]
    drafted, accepted = (sum(given.get(key, 0) for given in counts) for key in ("draft_n", "draft_n_accepted"))
    expected = sum(sum(ours.counts[place]) for place in equal) if ours.counts else 0
    loss = (expected - accepted) / max(expected, 1)
    is_wrong = loss <= TOLERANCE if is_control else abs(loss) > TOLERANCE
    is_wrong |= any(gap is not None and gap > TIE for gap in gaps)
    lengths = [prompt.inputs["input_ids"].shape[1] for prompt in prompts.ours]
    is_wrong |= [given["tokens_evaluated"] for given in said] != lengths or (ours.counts is not None and not expected)
    return Row([*title, texts, *map(str, (drafted, accepted, expected))], is_wrong)


def alone(target: sage.Target, prompts: Prompts) -> Answers:
    """Returns our answers without a draft."""
    options = {"policy": "autoregressive", "max_new_tokens": MAX_NEW_TOKENS}
    tokens = [sage.generate(target, None, prompt.inputs, **options).tokens.tolist() for prompt in prompts.ours]
    return Answers(tokens, [], DEPTH)


def lower_levels(draft: Any) -> None:
    """Names the hidden states one layer below those of training."""
    draft.config.feature_levels = [level - 1 for level in draft.config.feature_levels]


def first_levels(draft: Any) -> None:
    """Names the first hidden states."""
    draft.config.feature_levels = [1, 2, 3]


def other_mask_token(draft: Any) -> None:
    """Names another token for the slots."""
    draft.config.mask_token //= 2


def shifted_d2t(draft: Any) -> None:
    """Gives every draft token the target token of its neighbor."""
    ids = torch.arange(len(draft.d2t))
    draft.d2t.copy_((draft.d2t + ids).roll(1) - ids)


def foreign_lm_head(draft: Any) -> None:
    """Reverses the rows of the draft's lm_head."""
    draft.lm_head.weight.data.copy_(draft.lm_head.weight.flip(0))


DAMAGES = {  # of each draft
    "eagle3": (lower_levels, foreign_lm_head, shifted_d2t),
    "dflash": (other_mask_token,),
    "dspark": (first_levels, shifted_d2t),
}


def save_target(layout: Layout, folder: Path) -> sage.Target:
    """Saves a random target with the published model's tokenizer, and loads it."""
    save_layout(layout, folder)
    for file in FILES if layout.image else ("chat_template.jinja", *FILES):
        text = (build_published() / file).read_text()
        if layout.image is not None:
            for old, new in SPECIALS.items():
                text = text.replace(f'"<{old}>"', f'"{layout.tokens.get(new, new)}"')
        (folder / file).write_text(text)
    return sage.load_target(folder, dtype=torch.float32)


def new_draft(target: sage.Target, label: str, rows: list[dict[str, Any]]) -> Any:
    """Returns a fresh draft; `vocabulary` stands for the tokens of the examples."""
    kind, options = DRAFTS[label]
    chosen = {"vocabulary": torch.cat([row["input_ids"] for row in rows]).unique()} if options.get("vocabulary") else {}
    return sage.new_draft(target, kind, seed=0, **options | chosen)


def padded(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resizes an image to width and height as `img_tool::resize` of llama.cpp does: within them, then centered on black."""
    scale = min(size[0] / image.width, size[1] / image.height)
    width, height = (min(math.ceil(side * scale), most) for side, most in zip(image.size, size, strict=True))
    canvas = Image.new("RGB", size)
    canvas.paste(image.resize((width, height), Image.Resampling.BICUBIC), ((size[0] - width) // 2, (size[1] - height) // 2))
    return canvas


if __name__ == "__main__":
    sys.exit(main())
