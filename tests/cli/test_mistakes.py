"""Help and mistakes on the command line, one line with the nearest name, before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.messages import check_message
from support.train_helpers import environment

from sage.io.ranges import did_you_mean

MAINS = {
    "train": "train.cli.train:main",
    "validate": "train.cli.validate:main",
    "data": "train.cli.data:main",
    "export": "train.cli.export:main",
    "report": "train.report.__main__:console",
    "generate": "sage.commands.generate:main",
    "serve": "sage.serving.command:main",
    "bench": "sage.bench.__main__:console",
}
TARGET = "--target pocket_qwen3_vl"
REFUSED = {  # command line -> parts of the message
    "train --res runs/x": ["--res:", "did you mean --resume?"],
    "train optim.lr=0": ["optim.lr=0.0:"],
    "train -m seed=1,2 train.max_step=5": ["train.max_step:", "did you mean train.max_steps?"],
    "train target=pocket_qwen2_5_vl optim.learning_rate=1": ["optim.learning_rate:", "did you mean optim.lr?"],
    "train --data x.jsonl": ["--data:", "data=VALUE, without dashes"],
    "train --max-steps 3": ["--max-steps:", "train.max_steps=VALUE, without dashes"],
    "validate --compare --ouut x y": ["--ouut:", "did you mean --out?"],
    "validate chekpoint=x": ["did you mean checkpoint?"],
    "data data=mesages": ["did you mean data=messages?"],
    "export --formt eagle3": ["--formt:", "did you mean --format?"],
    "export gone --format eagle3 --out x": ["gone: no such folder"],
    "generate --promt=Hi": ["--promt:", "did you mean --prompt?"],
    "generate photo.jpg": ["photo.jpg: unexpected argument"],
    f"generate {TARGET} --prompt Hi --policy sgae": ["'sgae'", "did you mean sage?"],
    f"generate {TARGET}": ["--prompt: missing"],
    f"generate {TARGET} --prompt Hi --policy autoregressive --image gone.png": ["gone.png: no such file"],
    "generate --target pocket_qwen3_v --prompt Hi --policy autoregressive": ["did you mean pocket_qwen3_vl?"],
    "generate --trace a.txt": ["--trace a.txt: is no name of a page; give FILE.html"],
    "generate --trace a.html --check-device": ["--trace: has no effect with --check-device"],
    "serve --max-reqests=2": ["--max-reqests:", "did you mean --max-requests?"],
    f"bench {TARGET} --polcies chain": ["--polcies:", "did you mean --policies?"],
    f"bench {TARGET} --policies autoregressive --out /proc/x.json": ["/proc/x.json: could not be written"],
    f"bench {TARGET} --policies sgae": ["--policies: 'sgae' is unknown"],
    f"bench {TARGET} --policies autoregressive --baselines vllm": ["--baselines: 'vllm'"],
}
COMMANDS = """
import contextlib, io, json, pkgutil, sys
found = []
for home, words in json.loads(sys.argv[1]):
    main, sys.argv = pkgutil.resolve_name(home), ["command", *words]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
    found.append([code, output.getvalue(), errors.getvalue()])
heavy = ("torch", "transformers", "deepspeed", "wandb", "matplotlib")
print(json.dumps([found, [name for name in heavy if name in sys.modules]]))
"""


@pytest.mark.slow
def test_help_and_mistakes_need_no_torch(tmp_path: Path) -> None:
    """All commands in one process; a time limit would fail on a busy machine."""
    lines = [(MAINS[command], words) for command, *words in map(str.split, REFUSED)]
    lines += [(main, ["--help"]) for main in MAINS.values()]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(lines)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    answers, heavy = json.loads(done.stdout)
    assert heavy == [] and list(tmp_path.iterdir()) == []
    for (line, parts), (code, output, errors) in zip(REFUSED.items(), answers, strict=False):
        assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1 and not output, (line, code, errors)
        check_message(errors, *parts)
    for command, (code, output, errors) in zip(MAINS, answers[len(REFUSED) :], strict=True):
        assert code == 0 and f"sage-{command}" in output and not errors, (command, code, errors)


def test_the_nearest_name() -> None:
    assert did_you_mean("xyzzy", ["--image", "--prompt"]) == did_you_mean("x", ["xyzzy_and_more"]) == ""
    names = ["llama3_1_8b", "pocket_qwen2_5_vl"]
    assert did_you_mean("pocket", names, "target=") == " (did you mean target=pocket_qwen2_5_vl?)"
