"""The check that every export passes before it is put in its place, and that any folder can be given to alone."""

from __future__ import annotations

from pathlib import Path

from checkpoints.export.facts import TargetFacts, read_json
from checkpoints.export.folder import CONFIG, Weights, read_config
from checkpoints.export.formats.layout import EAGLE_CLASSES, Format, Head, eagle3_table, eagle_table, is_ours
from checkpoints.export.validator.config_checks import check_config
from checkpoints.export.validator.findings import Case, Check, Finding
from checkpoints.export.validator.tensor_checks import check_tensors
from checkpoints.export.writing import ABOUT, find_damage
from checkpoints.run_folder import CONFIG as RUN_CONFIG
from checkpoints.run_folder import is_run
from sage.manifest import CorruptFolder, has_manifest

UNREADABLE = "no engine can load it"


def check_folder(folder: Path, facts: TargetFacts | None = None) -> Check:
    """Examines an export, ours or anybody's.

    Args:
        folder: with config.json and weights.
        facts: of the target it is to serve; None = what an export of ours says about itself.

    Returns:
        everything found; nothing is raised for what is wrong with the folder's content.

    Raises:
        ValueError: no such folder.
    """
    check = Check(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if is_run(folder) and not (folder / CONFIG).is_file():
        effect = "no engine knows it: export its draft first (sage-export DIR --format ...)"
        check.findings.append(Finding(RUN_CONFIG, "a run's folder", effect))
        return check
    try:
        if has_manifest(folder):
            find_damage(folder)
        config = read_config(folder)
    except CorruptFolder as error:
        check.findings.append(Finding("manifest", str(error), "an engine would load the damaged file"))
        return check
    except ValueError as error:
        check.findings.append(Finding(CONFIG, str(error), UNREADABLE))
        return check
    try:
        facts = facts or _own_facts(folder)
    except ValueError as error:
        check.findings.append(Finding(ABOUT, str(error), "nothing can be held against its target"))
        return check
    return _check_content(check, config, facts)


def _check_content(check: Check, config: dict[str, object], facts: TargetFacts | None) -> Check:
    head = Head(config)
    check.format, check.flavour = head.format, head.flavour
    if is_ours(config):
        found = f"{config['model_type']!r}, a draft as sage saves it"
        check.findings.append(
            Finding("model_type", found, "no engine knows it: export it first (sage-export DIR --format ...)")
        )
        return check
    if head.format is None:
        known = ", ".join(["LlamaForCausalLMEagle3", "Eagle3DraftModel", *EAGLE_CLASSES.values()])
        found = f"{config.get('architectures')}, model_type {config.get('model_type')!r}; known drafts: {known}"
        check.findings.append(Finding("architectures", found, UNREADABLE + " as a draft"))
        return check
    try:
        weights = Weights(check.folder)
    except ValueError as error:
        check.findings.append(Finding("weights", str(error), UNREADABLE))
        return check
    table = eagle_table(head) if head.format == Format.eagle else eagle3_table(head)
    case = Case(head, weights, table, facts)
    check.findings += [*check_config(case), *check_tensors(case)]
    if facts is None:
        check.notes.append("vocabulary, context, rope and layers were not held against the target's: give --target DIR")
    return check


def _own_facts(folder: Path) -> TargetFacts | None:
    """The target's facts as an export of ours carries them."""
    if not (folder / ABOUT).is_file():
        return None
    return TargetFacts.from_dict(read_json(folder / ABOUT).get("target"))
