"""Messages quoted in docs/troubleshooting.md, rendered from the sources: `make docs` renews the marked blocks.

A message is found by a fragment of its text and filled in with example values, so that its wording stands in the code alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sage.io.tables import markdown_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
BLOCK = re.compile(r"(<!-- messages: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
PLACEHOLDER = "\0"
PLACEHOLDERS = re.compile(
    r"%[sd]|\{\w+(?::[^}]*)?\}"
)  # of logging and str.format; those of f-strings are found in the syntax tree


@dataclass(frozen=True)
class Part:
    """A string of the sources with example values.

    Attributes:
        file: module that contains it.
        fragment: text that only this string of the module contains.
        values: one per placeholder.
    """

    file: str
    fragment: str
    values: tuple[str, ...] = ()

    def render(self) -> str:
        """Returns the string with its values.

        Raises:
            ValueError: no message, or more than one, contains the fragment, or the number of values is wrong.
        """
        found = {text for text in texts(self.file) if self.fragment in text and "\n" not in text}
        if len(found) != 1:
            raise ValueError(f"{self.file}: {len(found)} strings contain {self.fragment!r}; adapt {Path(__file__).name}")
        pieces = found.pop().split(PLACEHOLDER)
        if len(pieces) != len(self.values) + 1:
            raise ValueError(f"{self.file}: {self.fragment!r} has {len(pieces) - 1} placeholders, not {len(self.values)}")
        return "".join(text for pair in zip(pieces, (*self.values, ""), strict=True) for text in pair)


@cache
def texts(file: str) -> tuple[str, ...]:
    """Returns all strings of a module, with PLACEHOLDER in place of values."""
    return tuple(_strings(ast.parse((ROOT / file).read_text(encoding="utf-8"))))


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield PLACEHOLDERS.sub(PLACEHOLDER, node.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


LAYOUT, EAGLE3 = "checkpoints/export/formats/layout.py", "checkpoints/export/formats/eagle3.py"
TENSORS = "checkpoints/export/validator/tensor_checks.py"
CONFIGS, COMPATIBILITY = "checkpoints/export/validator/config_checks.py", "checkpoints/export/compatibility.py"
RUN_CHECKS, RESUMING = "train/config/run_checks.py", "train/config/resuming.py"
WARNINGS, MEDIA = "train/report/warnings.py", "sage/inputs/media.py"
ITEM, SKIP = "error: chats.jsonl: item 0: ", Part("data_prep/dataset/skip_log.py", "data.on_bad=skip skips")
LENGTHS = "data_prep/dataset/lengths.py"
SIZES = "(hidden_size 192, num_layers 12, vocab_size {})"
MADE_FOR = ("a/draft", f"qwen2_5_vl {SIZES.format(1030)}", f"llava_onevision {SIZES.format(1028)}")
LEVELS = "eagle_aux_hidden_state_layer_ids"
READ = f"{LEVELS} and eagle_config.{LEVELS}: vLLM reads hidden_states[1, 2, 3], SGLang reads hidden_states[0, 1, 2]"
AT_IMAGES = ("vLLM", "the placeholder token's embedding", "the visual embedding", "token")

Message = tuple[Part | str, ...]
MESSAGES: dict[str, list[Message]] = {
    "template": [
        (ITEM, Part("data_prep/chat.py", "located in the rendered text")),
        (ITEM, Part("sage/inputs/processing.py", "its tokenizer has no chat template")),
    ],
    "images": [
        (ITEM, "image ", Part(MEDIA, "no such file", ("gone/a.png: ",)), SKIP),
        (ITEM, "image bad/a.png: ", Part(MEDIA, "corrupt or truncated", ("image file is truncated",)), SKIP),
    ],
    "length": [
        (Part(LENGTHS, "are too long for", ("3", "24 examples", "512", "2 shortened and 1 dropped", "turn", "1204")),),
        ("error: ", Part(LENGTHS, "drops all of", ("64", "24 examples", "turn", "151", "1204"))),
    ],
    "finite": [("error: ", Part("train/job/loop.py", "is not finite for", ("2", "train-9, train-4, train-5, train-8", "1")))],
    "estimate": [(Part(WARNINGS, "estimated on the training batches", ("40", "1.20", "3.00")),)],
    "acceptance": [(Part(WARNINGS, "acceptance rate is near zero", ("1.00",)),)],
    "target": [("error: ", Part("sage/drafts/head.py", "give the draft trained for", MADE_FOR))],
    "state": [
        (
            "warning: ",
            Part(
                "checkpoints/store.py",
                "using the previous state",
                (
                    Part(
                        "sage/io/manifest.py", "its sha256", ("a/state/step_00000004/exp_avg.safetensors", "manifest.json")
                    ).render(),
                ),
            ),
        ),
        (Part("train/state/resume.py", "resumed from", ("a/state/step_00000002",)),),
    ],
    "run": [
        ("error: ", Part(RUN_CHECKS, "already holds a run", ("a",))),
        ("error: ", Part(RESUMING, "was started with", ("seed", "5", "a", "0", "seed"))),
    ],
}
EXPORTS: list[tuple[Message, str]] = [
    (
        ("error: d2t: ", Part(TENSORS, "absolute target ids"), "; ", Part(TENSORS, "mapped to the wrong")),
        "subtract the draft ids",
    ),
    (("error: d2t: missing; ", Part(EAGLE3, "take draft ids")), "export again"),
    (("error: lm_head.weight: missing; ", Part(EAGLE3, "or a random one")), "export again"),
    (
        ("error: fc.weight: missing; ", Part(LAYOUT, "left uninitialized")),
        "a save that lost tensors, ZeRO-3 without gathering for example",
    ),
    (
        ("error: max_position_embeddings: 64, the target's is 512; ", Part(CONFIGS, "is served at acceptance", ("64",))),
        "set it to the target's",
    ),
    ((f"error: {READ}; ", Part(EAGLE3, "one of the engines")), "SGLang's list is one lower than vLLM's"),
    (("warning: ", Part(COMPATIBILITY, "At image positions", AT_IMAGES)), "train with `draft.image_inputs=token`"),
]


def render_blocks() -> dict[str, str]:
    """Returns the content of every block of the page by name."""
    blocks = {name: "\n".join(["```text", *map(_text, messages), "```"]) for name, messages in MESSAGES.items()}
    rows = [(f"`{_text(message)}`", remedy) for message, remedy in EXPORTS]
    return blocks | {"exports": markdown_table(("message", "cause or remedy"), rows, "<")}


def _text(message: Message) -> str:
    return "".join(part if isinstance(part, str) else part.render() for part in message)


def with_messages(page: str) -> str:
    """Returns the page with all blocks renewed."""
    blocks = render_blocks()
    return BLOCK.sub(lambda found: found.group(1) + blocks[found.group(2)] + found.group(3), page)


if __name__ == "__main__":
    PAGE.write_text(with_messages(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
