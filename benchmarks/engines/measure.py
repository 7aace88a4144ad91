"""Builds the decoders of a comparison and runs them: ours in this process, and a running server, or vLLM and llama.cpp in a
process per setting.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

import sage
from benchmarks.engines.comparison import LLAMA, OURS, VLLM, Answer, Decoder, figures, take_turns
from benchmarks.engines.llama import DRAFT_IN_FLOAT32, DRAFTED, FORMS, IN_FLOAT32, Llama, LlamaServer
from benchmarks.engines.server import SERVER, Refused, ServerClient, ServerDecoder, served_model
from checkpoints.export.exporter import ExportOptions, export
from checkpoints.export.formats import find_format
from checkpoints.run_folder import run_of
from data_prep.config import DataConfig, Images
from data_prep.conversation import Conversation
from data_prep.pocket import world
from data_prep.server.client import MediaPolicy, request_messages
from data_prep.sources.base import Split
from sage.bench.measurement import BenchPrompt
from sage.bench.options import Variant
from sage.bench.runners import AUTOREGRESSIVE, PolicyRunner, Runner, baseline_runner
from sage.commands.cli import resolve_device
from sage.decoding.answer import PREFILL_PHASES
from sage.decoding.settings import Sampling
from sage.io.dtypes import SHORT_NAMES, dtype_name
from sage.io.machine import available_cores, pin
from sage.runtime.executors import describe_passes
from sage.runtime.modes import MANY_ANSWERS, PassMode, resolve_pass_mode
from sage.runtime.timing import frozen_heap
from sage.targets import Target
from train.serve_check.vllm_process import EngineSetting, VllmProcess, prompt_data, validation_prompts, write_prompts

logger = logging.getLogger(__name__)
ENGINE_PYTHON = Path(".venv-engines/bin/python")
FORMAT = "eagle3"
NGRAM = {"method": "ngram", "prompt_lookup_max": 4}  # vLLM's speculation without a draft
NGRAM_TOKENS = 4


@dataclass(kw_only=True)
class Comparison:
    """What is compared.

    The first draft is also that of the other side: served by `server`, or an `eagle3`, exported for each engine in the dtype of
    its target.
    """

    python: Path = ENGINE_PYTHON  # interpreter of the environment with vLLM; unused with `server`
    llama: Path | None = None  # folder of `make engines-llama`: llama.cpp is compared as well, on text prompts
    server: str | None = field(default=None, repr=False)  # URL of a running server in place of the engines
    server_model: str | None = None  # its name of the target; None: the only one it serves
    server_key: str = field(default="", repr=False)  # empty: none
    target: str  # folder of the target
    drafts: dict[str, Path]  # folders by label
    variants: Sequence[Variant]  # our policies, each with every draft
    baselines: Sequence[str] = ()  # decoders without a draft beside our autoregressive loop, of `sage.bench.runners.BASELINES`
    depths: Sequence[int] = (1, 2, 3, 4, 5)  # drafted tokens per round of an engine; each is a setting
    ngram: bool = False  # whether vLLM also speculates by n-grams of the text
    num_prompts: int = 32
    repeats: int = 5
    max_new_tokens: int = 128
    passes: str = PassMode.auto  # how our passes run; `auto`: captured on a GPU, compiled on a CPU, since vLLM compiles as well
    cores: Sequence[int] = field(default_factory=available_cores)  # that all sides are pinned to, with one thread each
    device: str = "cpu"  # of our decoders
    dtypes: Sequence[torch.dtype | None] = (None,)  # of our decoders and vLLM; None: fp32 on the CPU, else the target's

    @property
    def served_draft(self) -> str:
        return next(iter(self.drafts))


def measure(comparison: Comparison) -> dict[str, Any]:
    """Runs the comparison; returns the figures of every decoder, ratios, versions and settings."""
    affinity, threads = available_cores(), torch.get_num_threads()
    pin(0, comparison.cores)
    torch.set_num_threads(len(comparison.cores))
    try:
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as processes:
            if comparison.server:
                client = processes.enter_context(ServerClient(comparison.server, comparison.server_key))
                return _measure_server(comparison, client, Path(scratch))
            targets = load_targets(comparison)
            prompts, prompts_file = write_prompts(targets[0], questions(comparison), Path(scratch))
            theirs, versions = vllm_decoders(comparison, prompts_file, Path(scratch), processes)
            if comparison.llama:
                theirs += llama_decoders(comparison, comparison.llama, prompts_file, Path(scratch), processes)
            return {"engine": versions, **_take_turns(comparison, targets, prompts, theirs)}
    finally:
        pin(0, affinity)
        torch.set_num_threads(threads)


def questions(comparison: Comparison) -> list[Conversation]:
    """Returns the held-out prompts of the first draft's run; of the pocket world, or without a run, those with one image."""
    run = run_of(comparison.drafts[comparison.served_draft])
    data = DataConfig() if run is None else prompt_data(run, comparison.target)
    if {source.kind for source in data.sources.values()} == {"pocket"}:
        return pocket_prompts(comparison.num_prompts)
    return validation_prompts(data, comparison.num_prompts)


def _measure_server(comparison: Comparison, client: ServerClient, scratch: Path) -> dict[str, Any]:
    model = served_model(client, comparison.server_model)
    data = prompt_data(run_of(comparison.drafts[comparison.served_draft]), comparison.target)
    conversations = validation_prompts(data, comparison.num_prompts)
    targets = load_targets(comparison)
    prompts, _ = write_prompts(targets[0], conversations, scratch)
    media = MediaPolicy.of(data, Split.validation, Images.inline)
    questions = [request_messages(conversation.messages, media) for conversation in conversations]
    decoder = server_decoder(comparison, client, model, targets[0], questions)
    before = client.counters()
    found = _take_turns(comparison, targets, prompts, [decoder])
    counts = client.counters()
    counts.subtract(before)
    rounds = counts.pop(0, 0)
    accepted = [counts[place] / rounds for place in sorted(counts)] if rounds else []
    return {"server": {"model": model, "rounds": rounds, "accepted": accepted}, **found}


@frozen_heap()
def _take_turns(
    comparison: Comparison, targets: Sequence[Target], prompts: Sequence[BenchPrompt], theirs: Sequence[Decoder]
) -> dict[str, Any]:
    ours = (decoder for target in targets for decoder in our_decoders(comparison, target, prompts))
    turns = take_turns([*ours, *theirs], comparison.repeats)
    return {
        "prompts": len(prompts),
        "repeats": comparison.repeats,
        "threads": len(comparison.cores),
        "passes": describe_passes(targets[0]),
        **figures(turns, comparison.served_draft),
    }


def server_decoder(
    comparison: Comparison, client: ServerClient, model: str, target: Target, questions: Sequence[Any]
) -> Decoder:
    """Returns the server as a decoder; it has a draft if it counts rounds of one."""
    assert target.processor is not None
    tokenizer, eos = target.processor.tokenizer, target.eos_token_ids[0]
    decoder = ServerDecoder(client, model, questions, tokenizer, eos, comparison.max_new_tokens)
    before = client.counters()
    try:
        decoder.answer(questions[0])
    except Refused:  # other servers may not know vLLM's extensions
        decoder = replace(decoder, extensions={})
        decoder.answer(questions[0])
    is_speculative = client.counters()[0] > before[0]
    return Decoder(SERVER, SERVER, comparison.served_draft if is_speculative else "", decoder.turn)


def vllm_decoders(
    comparison: Comparison, prompts_file: Path, scratch: Path, processes: ExitStack
) -> tuple[list[Decoder], dict[str, str]]:
    """Returns vLLM with each setting, loaded, and the versions of its packages."""
    found, versions = list[Decoder](), dict[str, str]()
    for dtype in (dtype or torch.float32 for dtype in comparison.dtypes):
        name = SHORT_NAMES[dtype_name(dtype)]
        export_folder = scratch / f"export_{name}"
        options = ExportOptions(target=comparison.target, dtype=dtype)
        export(comparison.drafts[comparison.served_draft], export_folder, FORMAT, options)
        plain = EngineSetting(target=comparison.target, dtype=dtype_name(dtype))
        drafting = replace(plain, draft=export_folder, speculative=find_format(FORMAT).vllm_options)
        settings = {"vllm": plain} | {f"vllm {depth} tokens": replace(drafting, depth=depth) for depth in comparison.depths}
        if comparison.ngram:
            settings["vllm ngram"] = replace(plain, depth=NGRAM_TOKENS, speculative=NGRAM)
        for setting_name, setting in settings.items():
            label = labelled(comparison, setting_name, name)
            logger.info("loading %s", label)
            log = scratch / f"{label.replace(' ', '_')}.log"
            limits: dict[str, Any] = {"max_new_tokens": comparison.max_new_tokens, "cores": comparison.cores}
            engine = processes.enter_context(VllmProcess(comparison.python, prompts_file, log, **limits))
            versions = engine.load(setting)
            passes = [len(answer["rounds"]) for answer in engine.trace()] if setting.depth else []

            def turn(engine: VllmProcess = engine, passes: Sequence[int] = passes) -> list[Answer]:
                pairs = zip_longest(engine.time(), passes)  # without a draft there are none
                return [Answer(**answer, passes=count) for answer, count in pairs]

            draft = comparison.served_draft if setting.draft else setting.speculative.get("method", "")
            found.append(Decoder(label, VLLM, draft, turn, name))
    return found, versions


def llama_decoders(
    comparison: Comparison, folder: Path, prompts_file: Path, scratch: Path, processes: ExitStack
) -> Iterator[Decoder]:
    """Yields llama.cpp with each form of the weights, without the draft and with it; ValueError for prompts with images."""
    llama, rows, draft = Llama(folder), json.loads(prompts_file.read_text()), comparison.drafts[comparison.served_draft]
    if any(row["images"] for row in rows):
        raise ValueError(f"--llama {folder}: prompts with images are not compared; give a text target")
    for name, (form, dtype) in FORMS.items():
        logger.info("loading llama.cpp, %s", name)
        model = llama.converted(Path(comparison.target), form, scratch / f"target-{form}.gguf")
        options, drafting = ["-m", str(model)], llama.exported(draft, Path(comparison.target), scratch / f"gguf_{form}", dtype)
        if dtype == torch.float32:
            options += IN_FLOAT32
            drafting += DRAFT_IN_FLOAT32
        for depth in (0, *comparison.depths):
            log = scratch / f"llama_{form}_{depth}.log"
            words = [*options, *drafting, DRAFTED, str(depth)] if depth else options
            server = processes.enter_context(llama.serving(words, log, comparison.cores))

            def turn(server: LlamaServer = server) -> list[Answer]:
                return [server.answer(row["ids"], comparison.max_new_tokens) for row in rows]

            label = f"llama.cpp {depth} tokens, {name}" if depth else f"llama.cpp, {name}"
            yield Decoder(label, LLAMA, comparison.served_draft if depth else "", turn, name)


def load_targets(comparison: Comparison) -> list[Target]:
    """Returns the target in each dtype."""
    device = resolve_device(comparison.device)
    default = torch.float32 if device.type == "cpu" else None
    found = [sage.load_target(comparison.target, dtype=dtype or default, device=device) for dtype in comparison.dtypes]
    for target in found:
        target.passes = resolve_pass_mode(comparison.passes, device.type, MANY_ANSWERS, target.is_plain)
    return found


def labelled(comparison: Comparison, label: str, dtype: str) -> str:
    """Returns the label of a decoder, with its dtype where several are compared."""
    return f"{label}, {dtype}" if len(comparison.dtypes) > 1 else label


def our_decoders(comparison: Comparison, target: Target, prompts: Sequence[BenchPrompt]) -> Iterator[Decoder]:
    """Yields our autoregressive loop, the baselines, and every policy with every draft."""
    sampling, dtype = Sampling(max_new_tokens=comparison.max_new_tokens), SHORT_NAMES[dtype_name(target.dtype)]
    for name in dict.fromkeys((AUTOREGRESSIVE, *comparison.baselines)):
        turn = partial(_our_turn, baseline_runner(target, name), prompts, sampling)
        yield Decoder(labelled(comparison, name, dtype), OURS, "", turn, dtype)
    for draft_label, folder in comparison.drafts.items():
        draft = sage.load_draft(folder, target)
        for variant in comparison.variants:
            runner = PolicyRunner(target, draft, variant.label, sage.policy(variant.policy, **variant.options))
            turn = partial(_our_turn, runner, prompts, sampling)
            yield Decoder(labelled(comparison, f"{variant.label}, {draft_label}", dtype), OURS, draft_label, turn, dtype)


def _our_turn(runner: Runner, prompts: Sequence[BenchPrompt], sampling: Sampling) -> list[Answer]:
    answers = []
    for run in (runner.run(prompt.inputs, sampling) for prompt in prompts):
        prefill_s = sum(run.time_s[phase] for phase in PREFILL_PHASES) if run.time_s else run.wall_s - run.decode_s
        passes = run.stats.target_passes if run.stats else None
        answers.append(Answer(run.tokens, run.wall_s - prefill_s, run.wall_s, passes))
    return answers


FAMILIES = ("caption", "question", "sign", "chart")  # one image each


def pocket_prompts(count: int, split: str = "test") -> list[Conversation]:
    """Returns `count` questions, the families in turns."""
    places = [divmod(number, len(FAMILIES)) for number in range(count)]
    return [question(split, index, FAMILIES[family]) for index, family in places]


def question(split: str, index: int, family: str) -> Conversation:
    """Returns the first question of a conversation."""
    talk = world.sample(split, index, [family])
    return replace(talk, id=f"{talk.id}-{family}", family=family, messages=talk.messages[:1])
