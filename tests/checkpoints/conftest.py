"""Fixtures of the tests of exports."""

import pytest


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory):
    """Tiny targets of both families, saved; shared by all tests, not to be changed."""
    from support.export_helpers import save_target

    return {
        family: save_target(tmp_path_factory.mktemp(family) / "target", family) for family in ("qwen2_5_vl", "llava_onevision")
    }


@pytest.fixture
def unserved(targets, monkeypatch: pytest.MonkeyPatch):
    """A target whose family no engine serves."""
    found = targets["llava_onevision"]
    monkeypatch.setattr(type(found.family), "served_by", ())
    return found


@pytest.fixture(scope="session")
def target(targets):
    """The target of `exports`."""
    return targets["qwen2_5_vl"]


@pytest.fixture(scope="session")
def exports(target, tmp_path_factory: pytest.TempPathFactory):
    """A folder with the export NAME and its draft NAME-draft for every row of `EXPORTS`; not to be changed."""
    from support.export_helpers import EXPORTS, export_draft, make_draft

    home = tmp_path_factory.mktemp("exports")
    for name, (kind, config, vocabulary, format_, options) in EXPORTS.items():
        make_draft(target, kind, vocabulary=vocabulary, **config).save_pretrained(home / f"{name}-draft")
        export_draft(home / f"{name}-draft", home / name, format_, **options)
    return home
