"""Every YAML file composes and passes the checks; every mistake is refused in one line, with nothing written."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support.messages import check_message, refused
from support.train_helpers import environment

from data_prep.config import validate as validate_data
from sage.bench.runners import AUTOREGRESSIVE, BASELINES
from sage.drafts.registry import KINDS as DRAFT_KINDS
from sage.io.files import config_dir
from sage.planning.options import defaults
from sage.trees import POLICIES, policy_class
from train.cli.train import main, train
from train.config.checks import check, check_batch
from train.config.hydra_app import compose, run_app
from train.config.schema import (
    Baseline,
    Config,
    ConfigError,
    PolicyName,
    Precision,
    Schedule,
    ValidateConfig,
)
from train.console.errors import report
from train.distill.chunked_loss import weighted_terms
from train.engine.engine import deepspeed_config, make_optimizer
from train.engine.lr_schedule import learning_rate
from train.launch.cluster_env import is_main_rank
from train.monitor.sinks import check_tracking
from train.plan.meta import build_on_meta
from train.validation.validate import build_policies

REFUSED_WITHIN_S = 5  # of this process's own time, so that a busy machine does not count
GROUPS = (
    "target",
    "draft/compressor",
    "data",
    "deepspeed",
    "objective",
    "optim",
    "train",
    "decode",
    "tracking",
    "launch",
    "experiment",
)
NEEDS = {  # keys that a choice requires
    "target=by_path": ["target.path=Qwen/Qwen2.5-VL-7B-Instruct"],
    "draft=model": ["draft.num_layers=2"],
    "data=llava_instruct": ["data.path=/data/llava.json"],
    "objective=eagle": ["draft=eagle"],  # a loss on features, which eagle3 does not predict
    "objective=distill": ["draft=eagle"],
    "experiment=specvlm": ["data.path=/data/llava.json"],
}
FILES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((config_dir() / group).glob("*.yaml"))]
CHOICES = [*FILES, *(f"draft={kind}" for kind in DRAFT_KINDS)]
PROMPT_FILES = sorted((config_dir() / "data" / "validation").glob("*.yaml"))
SWEEP_FILES = sorted((config_dir() / "sweep").glob("*.yaml"))


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_validates_and_builds(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where a 72B target takes no more memory than a pocket target; a plan needs no data."""
    monkeypatch.setenv("WANDB_MODE", "offline")  # tests have no login
    config = compose("config", ["launch.plan=true", choice, *NEEDS.get(choice, [])], Config)
    check(config)
    build_without_weights(config)


def build_without_weights(config: Config) -> None:
    """Builds the objects of a run that need neither weights nor data."""
    pair = build_on_meta(config)
    assert pair.trained_parameters > 0
    optimizer = make_optimizer(pair.draft, config, torch.device("meta"))
    assert optimizer.param_groups[0]["betas"] == (config.optim.beta1, config.optim.beta2)
    assert deepspeed_config(config, 1, check_batch(config, 1))["zero_optimization"]["stage"] == config.deepspeed.stage
    assert weighted_terms(config.objective)
    assert learning_rate(config.optim, 0, 100) > 0
    assert build_policies(config.decode)
    check_tracking(config)


def test_every_yaml_is_a_known_choice() -> None:
    """Every file is composed by a test."""
    tested = {config_dir() / f"{choice.replace('=', '/')}.yaml" for choice in FILES} | set(SWEEP_FILES)
    roots = {config_dir() / name for name in ("config.yaml", "validate.yaml", "prepare.yaml")}
    assert set(config_dir().rglob("*.yaml")) == tested | roots | set(PROMPT_FILES)


@pytest.mark.parametrize("path", PROMPT_FILES, ids=lambda path: path.stem)
def test_prompt_set_composes(path: Path) -> None:
    config = compose("config", [f"data/validation={path.stem}"], Config)
    assert config.data.validation.keys() == {path.stem}
    validate_data(config.data)


def test_validate_config_composes() -> None:
    config = compose("validate", ["checkpoint=runs/x", "decode.policies=[sage]"], ValidateConfig)
    assert config.checkpoint == "runs/x" and config.decode.policies == ["sage"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow
def test_a_policy_composes_with_its_defaults_and_every_option(name: str) -> None:
    assert compose("config", [f"decode/policy=[{name}]"], Config).decode.options == {name: {}}
    options = {option: value for option, value in defaults(policy_class(name)).items() if option != "paths"}
    given = [f"decode.options.{name}.{option}={'null' if value is None else value}" for option, value in options.items()]
    decode = compose("config", [f"decode/policy=[{name}]", *given], Config).decode
    assert decode.options == {name: options} and decode.policies == [name]
    build_policies(decode)


def test_the_schema_knows_every_policy_and_baseline() -> None:
    assert set(PolicyName) == set(POLICIES)
    assert set(Baseline) == set(BASELINES) - {AUTOREGRESSIVE}  # which is always measured


def test_measured_policies_are_the_composed_ones_unless_overridden() -> None:
    assert compose("config", ["decode/policy=[sage,chain]"], Config).decode.policies == ["sage", "chain"]
    config = compose("config", ["decode.policies=[static]", "decode.options.sage.max_depth=12"], Config)
    assert config.decode.policies == ["static"] and config.decode.options["sage"]["max_depth"] == 12


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_config_can_be_passed_to_other_processes(kind: str) -> None:
    config = compose("config", ["data=pocket", f"draft={kind}"], Config)
    assert pickle.loads(pickle.dumps(config)) == config


def test_precision_follows_the_target() -> None:
    assert compose("config", ["target=qwen2_5_vl_7b"], Config).train.precision is Precision.bf16
    assert compose("config", [], Config).train.precision is Precision.fp32


def test_the_specvlm_preset_is_its_recipe() -> None:
    """arXiv 2509.11815: online epochs over the LLaVA-1.5 mix, batch 128, constant 8e-5, 0.1 CE + 1.0 SmoothL1."""
    config = compose("config", ["experiment=specvlm"], Config)
    optim, objective = config.optim, config.objective
    assert (optim.lr, optim.beta1, optim.beta2, optim.weight_decay, optim.warmup_steps) == (8e-5, 0.9, 0.95, 0.0, 0)
    assert (optim.schedule, config.train.global_batch_size, config.train.epochs) == (Schedule.constant, 128, 5)
    assert (objective.ce_weight, objective.feature_weight, objective.steps) == (0.1, 1.0, 1)
    assert config.data.sources["llava"].kind == "llava_json" and config.target.name == "qwen2_5_vl_7b"


def test_the_eagle3_preset_is_its_recipe() -> None:
    """arXiv 2503.01840: no feature loss, seven unrolled steps weighted 0.8^i, a reduced vocabulary."""
    config = compose("config", ["experiment=eagle3"], Config)
    assert (config.objective.ce_weight, config.objective.feature_weight) == (1.0, 0.0)
    assert (config.objective.steps, config.objective.step_decay, config.draft.draft_vocab_size) == (7, 0.8, 32000)


@pytest.mark.parametrize("path", SWEEP_FILES, ids=lambda path: path.stem)
def test_a_sweep_plugin_that_is_not_installed_is_named(
    path: Path, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("hydra_plugins") is not None:
        pytest.skip("plugins of Hydra are installed")
    monkeypatch.setattr(sys, "argv", ["sage-train", "-m", f"sweep={path.stem}", "seed=1,2", "launch.plan=true"])
    assert run_app("config", Config, train, is_main_rank) == 2
    check_message(capsys.readouterr().err, "sage-draft[sweep]")


def test_a_searched_sweep_maximises_the_score() -> None:
    optuna = OmegaConf.load(config_dir() / "sweep" / "optuna.yaml").hydra
    assert (optuna.mode, optuna.sweeper.direction, optuna.sweeper.max_failure_rate) == ("MULTIRUN", "maximize", 1.0)


def test_run_name_is_made_of_the_choices() -> None:
    assert compose("config", [], Config).run.dir == "runs/pocket_qwen2_5_vl-eagle3-pocket"
    assert compose("config", ["experiment=demo"], Config).run.dir == "runs/demo"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["draft=eagle"], "pocket_qwen2_5_vl-eagle-pocket"),
        (["objective=lk"], "pocket_qwen2_5_vl-eagle3-pocket-lk"),
        (["draft=model", "objective=distill"], "pocket_qwen2_5_vl-model-pocket-distill"),
        (["data=messages", "data.path='/data/my rows, two.v2.jsonl'"], "pocket_qwen2_5_vl-eagle3-my_rows_two"),
        (["data=hub", "data.path=HuggingFaceM4/ChartQA"], "pocket_qwen2_5_vl-eagle3-ChartQA"),
        (["data=messages", f"data.path={'x' * 300}.jsonl"], f"pocket_qwen2_5_vl-eagle3-{'x' * 40}"),
        (["data=folder", "data.path=.."], "pocket_qwen2_5_vl-eagle3-data"),
        (["target=qwen2_5_vl_7b", "data=llava_instruct"], "qwen2_5_vl_7b-eagle3-llava_instruct"),
    ],
)
@pytest.mark.slow
def test_the_run_folder_tells_runs_apart_by_data_and_objective(overrides: list[str], name: str) -> None:
    config = compose("config", overrides, Config)
    assert (config.run.name, config.run.dir) == (name, f"runs/{name}")
    assert compose("config", [*overrides[:1], "run.dir=elsewhere"], Config).run.dir == "elsewhere"


WRONG = {
    "train.max_step=5": ["train.max_step:", "train.max_steps"],
    "trian.max_steps=5": ["trian.max_steps:", "train.max_steps"],
    "+train.foo=1": ["train.foo:"],
    "+foo=1": ["foo:"],
    "draft.window=1": ["draft.window:"],
    "tracking.project=x": ["tracking.project:", "tracking=wandb"],
    "deepspeed.extra.wall_clock_breakdown=true": ["+deepspeed.extra.wall_clock_breakdown=VALUE"],
    "optim.lr=fast": ["optim.lr=fast:", "float"],
    "train.max_steps=1.5": ["train.max_steps=1.5:", "int or null"],
    "optim.schedule=step": ["optim.schedule=step:", "one of constant, cosine"],
    "draft=eagle draft.input_norm=maybe": ["draft.input_norm:", "bool"],
    "decode.policies=[sgae]": ["decode.policies[0]=sgae:", "sage"],
    "decode.policies=sage": ["decode.policies:", "list of one of"],
    "target=foo": ["target=foo:"],
    "draft=eagel": ["draft=eagel:", "draft=eagle"],
    "decode/policy=[stat]": ["decode/policy=stat:", "decode/policy=static"],
    "train.max_steps": ["train.max_steps:"],
    "train.global_batch_size=???": ["train.global_batch_size:"],
    "run.name=a,b": ["run.name=a,b"],
    "seed=-1": ["seed=-1:"],
    "run.dir=": ["run.dir=:"],
    "target.path=/no/such/folder": ["target.path=/no/such/folder:"],
    "draft.path=./nothing": ["draft.path: ./nothing:", "RUN/draft_best"],
    "data=llava_instruct": ["data.path:"],
    "data.max_length=1": ["data.max_length", "1"],
    "train.epochs=0": ["train.epochs=0:"],
    "train.save_every=-1": ["train.save_every=-1:"],
    "train.global_batch_size=6": ["train.global_batch_size=6:"],
    "launch.ranks=3": ["train.micro_batch_size=4", "3 rank(s)"],
    "launch.gpus=0": ["launch.gpus=0:"],
    "optim.lr=0": ["optim.lr=0.0:"],
    "optim.beta2=1": ["optim.beta2=1.0:"],
    "optim.min_lr_ratio=0.1": ["optim.min_lr_ratio=0.1:"],
    "objective.ce_weight=-1": ["objective.ce_weight=-1.0:"],
    "objective.chunk_tokens=0": ["objective.chunk_tokens=0:"],
    "deepspeed.stage=4": ["deepspeed.stage=4:"],
    "+deepspeed.extra.train_batch_size=1": ["deepspeed.extra.train_batch_size:"],
    "decode.top_p=0": ["decode.top_p=0.0:"],
    "decode.couple=false": ["decode.couple=false:", "decode.temperature=0"],
    "decode.assistant=/no/such": ["decode.assistant=/no/such:"],
    "decode.policies=[]": ["decode.policies=:"],
    "decode.policies=[sage,sage]": ["decode.policies=sage,sage:"],
    "decode.options.sage=5": ["decode.options.sage=5:"],
    "decode.options.static=null": ["decode.options.static=None:"],
    "decode.num_prompts=0": ["decode.num_prompts=0:"],
    "draft.num_attention_heads=6 draft.num_key_value_heads=4": ["draft.num_key_value_heads=4:"],
    "launch.gpus=2 launch.ranks=4": ["launch.ranks=4:"],
    "objective.ce_weight=0 objective.feature_weight=0": ["objective.ce_weight=0", "objective.feature_weight=0"],
    "objective.lk_weight=-0.1": ["objective.lk_weight=-0.1:"],
    "objective.tv_weight=-1": ["objective.tv_weight=-1.0:"],
    "objective.steps=0": ["objective.steps=0:"],
    "objective.step_decay=0": ["objective.step_decay=0.0:"],
    "objective.temperature=0": ["objective.temperature=0.0:"],
    "draft=eagle3 objective=distill": ["objective.feature_weight=1.0:"],
    "draft=eagle3 draft.draft_vocab_size=0": ["draft.draft_vocab_size=0:"],
    "draft=eagle3 draft.feature_levels=[3,3,9]": ["draft.feature_levels=3,3,9:"],
    "draft=eagle3 draft.feature_levels=[-1,3,9]": ["draft.feature_levels=-1,3,9:"],
    "draft=eagle draft.feature_levels=[1,2,3]": ["draft.feature_levels"],
    "draft=model": ["draft=model:"],
    "draft=model draft.num_layers=0": ["draft.num_layers=0:"],
    "draft=model draft.num_layers=2 draft.train_part=head": ["draft.train_part=head:", "layers"],
    "draft=model draft.num_layers=2 objective.steps=3": ["objective.steps=3:"],
    "draft=model draft.num_layers=2 objective.feature_noise=0.1": ["objective.feature_noise=0.1:"],
    "draft=model draft.num_layers=2 draft.image_inputs=token": ["draft.image_inputs"],
    "draft=eagle3 draft.path=. draft.draft_vocab_size=100": ["draft.draft_vocab_size=100:"],
    "draft=model draft.num_layers=2 deepspeed.shard_target=true": ["deepspeed.shard_target=true:"],
    "draft=model draft.num_layers=2 deepspeed=zero3 launch.ranks=2": ["deepspeed.stage=3:"],
    "draft=model draft.num_layers=2 draft.train_part=all deepspeed=zero1 launch.ranks=2": ["deepspeed.stage=1:"],
    "deepspeed=zero0 deepspeed.offload_optimizer=cpu": ["deepspeed.offload_optimizer=cpu:"],
    "train.patience=3": ["train.patience=3:"],
    "train.patience=-1": ["train.patience=-1:"],
    "train.profile=[4]": ["train.profile=4:"],
    "train.profile=[5,4]": ["train.profile=5,4:"],
    "train.validate_on=some": ["train.validate_on=some:", "one of auto, main, all"],
    "score.metric=loss": ["score.metric=loss:", "one of tokens_per_target_pass, speedup"],
    "score.policy=eagle2": ["score.policy=eagle2:"],
    "score.policy=autoregressive": ["score.policy=autoregressive:"],
    "decode.policies=[autoregressive] train.validate_every=5 train.patience=1": ["train.patience=1:"],
    "launch.gpu_memory_gb=0": ["launch.gpu_memory_gb=0.0:"],
    "launch.gpu_tflops=-1": ["launch.gpu_tflops=-1.0:"],
    "launch.plan=true target.path=no/such/folder": ["target.path=no/such/folder:"],
    "sweep=grid": ["sweep=grid:"],
    "optim.warmup_steps=9 train.max_steps=5": ["optim.warmup_steps=9:"],
    "train.profile=[a]": ["train.profile[0]=a:", "int"],
    "data.sources.pocket.num_examples=x": ["data.sources.pocket.num_examples=x:", "int"],
    "deepspeed.extra=3": ["deepspeed.extra:", "mapping"],
    "launch.plan=true decode.options.chain.depth=abc": ["decode.options.chain.depth:", "abc", "integer"],
    "launch.plan=true decode.options.sage.colour=1": ["decode.options.sage.colour:", "unknown"],
}


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("overrides", "parts"), WRONG.items(), ids=WRONG.keys())
@pytest.mark.slow
def test_mistakes_are_refused_by_name_with_exit_code_2(
    overrides: str, parts: list[str], in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # an existing target folder; its content is read only after all of these checks
    monkeypatch.setattr(sys, "argv", ["sage-train", f"target.path={in_empty_folder}", *overrides.split()])
    started = time.process_time()
    assert run_app("config", Config, train, is_main_rank) == 2
    assert time.process_time() - started < REFUSED_WITHIN_S
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
    check_message(shown.err, *parts)
    assert shown.out == ""
    assert list(in_empty_folder.iterdir()) == []


def test_negative_control_a_good_configuration_passes(in_empty_folder: Path) -> None:
    check(compose("config", [f"target.path={in_empty_folder}"], Config))


def config_in(folder: Path, *overrides: str) -> Config:
    config: Config = compose("config", [f"target.path={folder}", f"run.dir={folder}/run", *overrides], Config)
    return config


def test_an_existing_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    check(config_in(tmp_path))  # empty
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with refused("run.dir=", "empty folder", error=ConfigError):
        check(config_in(tmp_path))
    (tmp_path / "run" / "config.yaml").write_text("seed: 0")
    with refused("run.dir=", "run.resume=true", error=ConfigError):
        check(config_in(tmp_path))


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for run in ("file", "file/run", "file/below/run"):
        with refused(f"run.dir={tmp_path}/{run}:", error=ConfigError):
            check(config_in(tmp_path, f"run.dir={tmp_path}/{run}"))
    saved = OmegaConf.to_yaml(OmegaConf.structured(config_in(tmp_path)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(saved)

    def fail(*_: object, **__: object) -> None:  # root may write anywhere, so a read-only folder is simulated
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    for overrides in ([f"run.dir={tmp_path}/new/run"], ["run.resume=true"]):
        with refused("run.dir=", "Permission denied", error=ConfigError):
            check(config_in(tmp_path, *overrides))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_the_command_refuses_such_a_run_folder_with_exit_code_2(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_empty_folder / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["sage-train", f"target.path={in_empty_folder}", "run.dir=file/run"])
    assert run_app("config", Config, train, is_main_rank) == 2
    check_message(capsys.readouterr().err, "run.dir=file/run", "Not a directory")


@pytest.mark.parametrize(
    "change", ["seed=1", "train.global_batch_size=64", "draft.image_inputs=token", "score.metric=speedup", "data.cache=rows"]
)
@pytest.mark.slow
def test_resuming_with_another_setting_is_refused_by_key(tmp_path: Path, change: str) -> None:
    first = config_in(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(first)))
    check(config_in(tmp_path, "run.resume=true", "train.max_steps=7", "optim.lr=1", "launch.ranks=2"))  # these may change
    key, _, value = change.partition("=")
    with refused(f"{key}={value}", error=ConfigError):
        check(config_in(tmp_path, "run.resume=true", change))


def test_a_corrupt_run_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: [")
    with refused("config.yaml", error=ConfigError):
        check(config_in(tmp_path, "run.resume=true"))


def test_a_crash_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(config: Config) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(sys, "argv", ["sage-train"])
    assert run_app("config", Config, broken, is_main_rank) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.endswith("error: RuntimeError: a bug\n")


def test_debug_shows_where_a_mistake_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sage-train", "--debug", "seed=-1", f"target.path={tmp_path}"])
    assert run_app("config", Config, train, is_main_rank) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "error: seed=-1" in shown


@pytest.mark.slow
def test_a_failed_job_does_not_end_a_sweep(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, str]] = []

    def task(config: Config) -> int:
        if config.seed == 1:
            raise ConfigError("seed=1: not this one")
        seen.append((config.seed, config.run.dir))
        return 0

    monkeypatch.setattr(sys, "argv", ["sage-train", "-m", "seed=0,1,2", "run.dir=sweep"])
    assert run_app("config", Config, task, is_main_rank) == 2
    assert seen == [(0, "sweep/seed_0"), (2, "sweep/seed_2")]
    shown = capsys.readouterr().err
    assert "error: seed=1: not this one" in shown
    assert shown.endswith("error: 1 of 3 jobs failed: seed=1 (exit 2: seed=1: not this one)\n")
    (records,) = (in_empty_folder / "runs" / ".sweep").iterdir()
    assert sorted(path.name for path in records.iterdir()) == [*(f"job_0000{n}.json" for n in range(3)), "multirun.yaml"]


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_help_answers_without_torch(tmp_path: Path) -> None:
    """Help takes less than 3 s on an idle machine; on a busy one only the imports can be tested."""
    code = (
        "import sys; from train.cli.train import main\n"
        "try: main()\n"
        "finally: print('HEAVY', [m for m in ('torch', 'transformers', 'deepspeed', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    assert "sage-train experiment=demo" in done.stdout and "qwen2_5_vl_72b" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["optim.lr=0"], ["-m", "seed=1,2", "train.max_step=5"]], ids=["run", "sweep"])
def test_the_command_itself_refuses_without_torch(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from train.cli.train import main\n"
        "try: main()\n"
        "finally: print('HEAVY', [m for m in ('torch', 'transformers', 'deepspeed', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == "HEAVY []\n"
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("module", "script"), {"": "sage-train", ".validate": "sage-validate", ".data": "sage-data"}.items())
def test_commands_run_as_modules(tmp_path: Path, module: str, script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"train.cli{module}", "--help"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and script in done.stdout, done.stderr


def test_rank_0_alone_reports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not is_main_rank() and report(ConfigError("seed=-1"), is_main_rank()) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("overrides", "lr", "batch"),
    [
        (["target=pocket_qwen2_5_vl"], 8e-3, 16),
        (["target=qwen2_5_vl_7b"], 8e-5, 128),
        (["target=qwen2_5_vl_7b", "optim=adamw_cosine", "optim.lr=1e-3"], 1e-3, 128),
        (["target.path=Own/Model"], 8e-5, 128),  # a hub id: its width is unknown
        (["experiment=demo"], 8e-3, 16),
        (["experiment=specvlm", "target=qwen2_5_vl_72b"], 8e-5, 128),
    ],
)
def test_training_defaults_suit_the_target(overrides: list[str], lr: float, batch: int) -> None:
    config = compose("config", overrides, Config)
    assert (config.optim.lr, config.train.global_batch_size) == (lr, batch)


def test_learning_rate_of_an_own_target_follows_its_width(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 1792}}')
    assert compose("config", [f"target.path={tmp_path}"], Config).optim.lr == 1.6e-4


def test_kinds_of_draft_by_default() -> None:
    kinds = [compose("config", words, Config).draft.kind for words in ([], ["experiment=demo"], ["experiment=specvlm"])]
    assert kinds == ["eagle3", "eagle", "eagle"]


def test_sage_train_without_arguments_says_what_to_choose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_empty_folder: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["sage-train"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2 and not list(in_empty_folder.iterdir())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all("sage-train" in line for line in lines[1:])
