"""The sage-export command: modes, errors, model card, upload."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors import SafetensorError
from support.export_helpers import REDUCED, edit_json, export_draft, save_draft, save_run, save_target
from support.messages import check_message, refused

from checkpoints.export.folder import push_to_hub

ID = "Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a run with two validations (the first has the better score), and a draft without a run."""
    folder = tmp_path_factory.mktemp("home")
    target = save_target(folder / "target")
    save_run(folder / "run", target, {100: 2.5, 200: 2.25}, vocabulary=REDUCED)
    save_draft(folder / "lone", target)
    export_draft(folder / "run", folder / "export")
    return folder


class TestCommand:
    def test_export_of_a_run(self, home: Path, tmp_path: Path, sage_export: Any) -> None:
        code, out, _ = sage_export(home / "run", "--format", "eagle3", "--out", tmp_path / "out")
        assert code == 0
        assert f"draft: {home / 'run' / 'draft_best'}, 100 steps" in out
        assert "bit-identical" in out
        check_message(next(line for line in out.splitlines() if line.startswith("warning: At image")), "vLLM")
        assert (tmp_path / "out" / "model.safetensors").is_file()

    def test_check_and_inspect(self, home: Path, tmp_path: Path, sage_export: Any) -> None:
        code, out, _ = sage_export("--check", home / "export")
        assert (code, out.splitlines()[-1]) == (0, f"{home / 'export'}: eagle3; valid")
        edit_json(export_draft(home / "run", tmp_path / "bad").folder / "config.json", lambda c: c.update(vocab_size=1))
        code, out, _ = sage_export("--check", tmp_path / "bad")
        assert code == 2
        assert "error: manifest.json: " in out
        assert "config.json: corrupt" in out
        assert "1 error: do not serve this" in out
        code, out, _ = sage_export("--inspect", home / "export")
        assert (code, "export, intact" in out) == (0, True)
        assert sage_export("--inspect", tmp_path / "bad")[0] == 2

    @pytest.mark.parametrize("error", [OSError(28, "No space left", "/x/.o.part"), SafetensorError("I/O error: No space left")])
    def test_full_disk(self, home, tmp_path, sage_export, monkeypatch, error):
        def full(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr("checkpoints.export.exporter.save_file", full)
        monkeypatch.setattr("sage.drafts.eagle.Eagle3Draft.save_pretrained", full)
        for arguments in (
            (home / "lone", "--format", "eagle3"),
            ("--import", home / "export", "--target", home / "target", "--levels", "0,1,2"),
        ):
            code, _, err = sage_export(*arguments, "--out", tmp_path / "o")
            assert (code, err.count("\n")) == (2, 1)
            assert f"--out {tmp_path / 'o'}: could not be written" in err
            assert ("No space left" in err, ".part" in err) == (True, False)
            assert not list(tmp_path.iterdir())

    def test_import(self, home: Path, tmp_path: Path, sage_export: Any) -> None:
        arguments = ("--import", home / "export", "--target", home / "target", "--out", tmp_path / "ours", "--levels", "0,1,2")
        code, out, _ = sage_export(*arguments, "--image-inputs", "token")
        assert code == 0
        assert f"sage-validate draft={tmp_path / 'ours'} target.path={home / 'target'}" in out
        config = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert (config["model_type"], config["image_inputs"]) == ("sage_eagle3", "token")

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            ((), ("--format", "--out", "--check, --inspect or --import")),
            (("lone",), ("--out: missing",)),
            (("lone", "--out", "o"), ("--format: missing", "eagle3, speculators, eagle")),
            (("lone", "--format", "gguf", "--out", "o"), ("--converter: missing", "llama.cpp")),
            (("lone", "--format", "eagle3", "--out", "o", "--converter", "c"), ("--converter: has no effect",)),
            (("--import", "lone", "--out", "o", "--target", "target"), ("lone: already a draft",)),
            (("lone", "--format", "eagle3", "--out", "/proc/o/o"), ("--out /proc/o/o",)),
            (("--check", "export", "--format", "eagle3"), ("--format: ", "--check")),
            (("--check", "export", "--target", "gone"), ("--target gone: no such folder",)),
            (("lone", "--format", "eagle3", "--out", "o", "--json"), ("--json", "--check", "--inspect")),
            (("--import", "export", "--out", "o"), ("--target: missing",)),
            (("--import", "export", "--out", "o", "--target", "target", "--levels", "a"), ("--levels a", "2,14,25")),
        ],
    )
    def test_errors_are_one_line(self, home, sage_export, monkeypatch, arguments, parts):
        monkeypatch.chdir(home)
        code, _, err = sage_export(*arguments)
        assert code == 2
        assert err.count("\n") == 1
        check_message(err, *parts)
        assert not (home / "o").exists()


class TestCard:
    def card(self, export: Path) -> tuple[dict[str, Any], str]:
        _, matter, body = (export / "README.md").read_text().split("---\n", 2)
        return yaml.safe_load(matter), body

    def test_table_of_the_report(self, home: Path, tmp_path: Path) -> None:
        _, body = self.card(home / "export")
        assert "| `sage` | 2.50 | 1.50 | 50.0 | 1.75x | 1.50x | 4/4 |" in body
        assert "4 prompts, float32 on cpu, temperature 0, at most 64 new tokens" in body
        last = export_draft(home / "run" / "draft", tmp_path / "last", "eagle3").folder
        assert "| `sage` | 2.25 |" in (last / "README.md").read_text()

    def test_measurements_of_a_later_check(self, home: Path, tmp_path: Path, sage_export: Any) -> None:
        check = tmp_path / "check"
        shutil.copytree(home / "run" / "validation" / "step_00000100", check)
        edit_json(check / "report.json", lambda content: content.update(step=100, prompts=7))
        arguments = [home / "run", "--format", "eagle3", "--allow-unserved", "--report", check, "--out"]
        assert sage_export(*arguments, tmp_path / "out")[0] == 0
        assert "7 prompts, float32 on cpu" in (tmp_path / "out" / "README.md").read_text()

    def test_serve_commands_and_license(self, home: Path, tmp_path: Path) -> None:
        terms = {"license": "apache-2.0", "license_link": "https://x.org/l"}
        matter, body = self.card(export_draft(home / "run", tmp_path / "out", target_name=ID, name="me/draft", **terms).folder)
        assert (matter["license"], matter["license_link"], matter["base_model"]) == ("apache-2.0", "https://x.org/l", ID)
        assert "license_name" not in matter and "Apache-2.0 (https://x.org/l)" in body
        assert f"vllm serve {ID}" in body
        assert '"method": "eagle3", "model": "me/draft", "num_speculative_tokens": 3' in body
        assert f"sglang.launch_server --model-path {ID}" in body
        assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path me/draft" in body
        assert "sage-export --import me/draft" in body

    def test_recipe_without_local_folders_and_license(self, home: Path) -> None:
        matter, body = self.card(home / "export")
        assert (matter["license"], matter["license_name"]) == ("other", "not-stated") and "Not stated" in body
        for line in (
            "`seed`: 3",
            "`data.max_length`: 2048",
            "`launch.gpus`: 8",
            "data: llava (fingerprint `f00d`)",
            "code: 0123abc with uncommitted changes",
        ):
            assert line in body
        assert "/home/me" not in body
        assert not [key for key in ("train.epochs", "launch.ranks", "launch.timeout_s") if key in body]


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
        """A fake hub that records its calls."""
        calls: list[tuple[str, dict[str, Any]]] = []

        class Api:
            def create_repo(self, repo_id: str, **options: Any) -> None:
                calls.append(("create", {"repo_id": repo_id, **options}))

            def upload_folder(self, **options: Any) -> Any:
                if "forbidden" in options["repo_id"]:
                    raise OSError("401 Unauthorized")
                calls.append(("upload", options))
                return SimpleNamespace(commit_url="https://hub/commit/1")

        monkeypatch.setattr("huggingface_hub.HfApi", Api)
        return calls

    def test_push(self, home: Path, tmp_path: Path, sage_export: Any, hub: Any) -> None:
        options = ("--target-name", ID, "--push-to-hub", "me/draft", "--private", "--license", "mit")
        code, out, _ = sage_export(home / "run", "--format", "eagle3", "--out", tmp_path / "out", *options)
        assert (code, out.splitlines()[-1]) == (0, "https://hub/commit/1")
        assert hub[0] == ("create", {"repo_id": "me/draft", "private": True, "exist_ok": True, "repo_type": "model"})
        assert hub[1][1]["folder_path"] == tmp_path / "out"
        assert "me/draft" in (tmp_path / "out" / "README.md").read_text()

    def test_uploads_that_are_refused(self, home: Path, tmp_path: Path, hub: Any) -> None:
        with refused("--push-to-hub", "target", "--target-name"):
            push_to_hub(home / "export", "me/draft")
        with refused("--push-to-hub draft", "owner/name"):
            push_to_hub(home / "export", "draft")
        out = export_draft(home / "lone", tmp_path / "out", target_name=ID).folder
        with refused("--push-to-hub forbidden/draft", "401 Unauthorized", "hf auth login"):
            push_to_hub(out, "forbidden/draft")
        (out / "README.md").write_text("")
        with refused("README.md", "0 bytes"):
            push_to_hub(out, "me/draft")
        assert [what for what, _ in hub] == ["create"]
