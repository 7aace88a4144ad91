"""Nodes that do not share a disk: which ranks see a folder of rank 0, and copies of its files for those that do not."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.store import part_path, saving
from sage.io.files import atomic_path
from train.config.schema import ConfigError
from train.launch import cluster_env
from train.launch.ranks import Ranks

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 26  # that are sent at once


def blind_ranks(ranks: Ranks, folder: Path) -> dict[int, str]:
    """Returns the ranks that do not see `folder` of rank 0, which is created if needed, and their hosts. Collective."""
    if ranks.world_size == 1:
        return {}
    token = folder / ranks.broadcast(f".seen_{uuid.uuid4().hex}.part")  # a new name: no file server has cached its absence
    if ranks.is_main:
        with saving(folder, then="start again"):
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
    ranks.gather(None)  # until the token is there
    with suppress(OSError):
        os.listdir(folder.parent)  # opening it makes NFS look again for a folder that did not exist a moment ago
    seen = ranks.gather((token.exists(), socket.gethostname()))
    if ranks.is_main:
        token.unlink(missing_ok=True)
    return {rank: host for rank, (is_seen, host) in enumerate(seen) if not is_seen}


def check_same(ranks: Ranks, subject: str, value: Any) -> None:
    """Raises ConfigError, on every rank, if `value` differs between ranks; `subject` names what it is. Collective."""
    hosts = ranks.gather((socket.gethostname(), value))
    for rank, (host, other) in enumerate(hosts):
        if other != hosts[0][1]:
            raise ConfigError(
                f"{subject}: {other} for rank {rank} on {host}, but {hosts[0][1]} for rank 0 on {hosts[0][0]}; "
                "give every node the same files"
            )


@dataclass(frozen=True, kw_only=True)
class RunDisk:
    """The run folder of rank 0 as this rank sees it."""

    ranks: Ranks
    is_remote: bool = False  # this rank does not see it
    is_copying: bool = False  # this rank keeps the copies of its node
    has_remote: bool = False  # some rank does not see it

    @classmethod
    def of(cls, ranks: Ranks, run: Path) -> RunDisk:
        """Finds out who sees the run folder. Collective."""
        blind = blind_ranks(ranks, run)
        if not blind:
            return cls(ranks=ranks)
        hosts = ", ".join(dict.fromkeys(blind.values()))
        logger.info("run.dir=%s: not shared with %s; states, drafts and reports are on rank 0 alone", run.absolute(), hosts)
        is_remote = ranks.rank in blind
        nodes = ranks.gather((is_remote, cluster_env.node()))
        is_first = nodes.index(nodes[ranks.rank]) == ranks.rank
        return cls(ranks=ranks, is_remote=is_remote, is_copying=is_remote and is_first, has_remote=True)

    def fetch(self, folder: Path) -> Path:
        """Returns where this rank can read a folder that rank 0 has written: there, or in a copy beside it. Collective."""
        copy = part_path(folder.with_name(f"{folder.name}.copy"))
        self.copy(folder, copy)
        return copy if self.is_remote else folder

    def copy(self, folder: Path, to: Path, pattern: str = "**/*") -> None:
        """Copies files of rank 0 to every node that does not see them; SaveFailed on a rank that cannot write. Collective."""
        if not self.has_remote:
            return
        files = sorted(path for path in folder.glob(pattern) if path.is_file()) if self.ranks.is_main else []
        for name, size in self.ranks.broadcast([(str(path.relative_to(folder)), path.stat().st_size) for path in files]):
            with saving(to), atomic_path(to / name) if self.is_copying else nullcontext(Path()) as part:
                for first in range(0, max(size, 1), CHUNK_BYTES):
                    content = self.ranks.broadcast(_read(folder / name, first) if self.ranks.is_main else None)
                    if self.is_copying:
                        with part.open("ab") as file:
                            file.write(content)
        self.ranks.gather(None)  # until the other ranks of the node can read them


def _read(path: Path, first: int) -> bytes:
    with path.open("rb") as file:
        file.seek(first)
        return file.read(CHUNK_BYTES)
