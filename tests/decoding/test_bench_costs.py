"""Cost measurement on random weights: shapes, linear extrapolation, complete tables, projection."""

import json
from dataclasses import replace

import pytest
import torch
from support.messages import refused

from sage.bench.__main__ import main
from sage.bench.costs import (
    extrapolated,
    format_costs,
    format_projection,
    measure_shape_costs,
    project,
    roofline_costs,
    without_layers,
)
from sage.bench.random_targets import layers_that_fit, random_target
from sage.bench.shapes import Shape, shape_named, shapes

CPU = torch.device("cpu")
TINY = Shape("tiny", hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, vocab_size=64, head_dim=8)


def costs(num_layers, **options):
    return measure_shape_costs(
        TINY, num_layers, torch.float32, CPU, nodes=(1, 4), widths=(1, 3), contexts=(8, 32), repeats=1, **options
    )


def test_the_grid_is_complete_and_all_layers_need_no_extrapolation():
    found = costs(4)
    assert [(row["nodes"], row["context"]) for row in found["verify"]] == [(1, 8), (4, 8), (1, 32), (4, 32)]
    assert [(row["width"], row["context"]) for row in found["draft"]] == [(1, 8), (3, 8), (1, 32), (3, 32)]
    assert not found["is_extrapolated"] and all(row["seconds"] == row["measured_s"] > 0 for row in found["verify"])
    assert "all 4 layers measured" in format_costs(found)


def test_fewer_layers_are_extrapolated_and_marked():
    found = costs(1)
    assert found["is_extrapolated"] and all(row["seconds"] >= row["measured_s"] for row in found["verify"])
    assert "1 of 4 layers measured, the rest extrapolated" in format_costs(found)


@pytest.mark.parametrize("num_layers", [0, 5])
def test_a_layer_count_the_shape_does_not_have_is_refused(num_layers):
    with refused(f"--layers {num_layers}", "1 to 4"):
        costs(num_layers)


def test_extrapolation_is_the_line_through_both_points():
    """1 s without layers, 3 s with two: one second per layer, so ten layers take 11 s."""
    assert extrapolated(1.0, 3.0, 2, 10) == pytest.approx(11.0)
    assert extrapolated(3.1, 3.0, 2, 10) == 3.0  # noise must not make more layers cheaper


def test_layers_are_restored_after_an_error():
    target = random_target(TINY, 2, torch.float32, CPU, 64)
    with pytest.raises(KeyError), without_layers(target):
        assert len(target.text_model.layers) == 0
        raise KeyError
    assert len(target.text_model.layers) == 2


@pytest.mark.parametrize("model_type", sorted({shape.model_type for shape in shapes().values()}))
def test_a_random_target_has_the_parameters_of_the_shape_in_the_given_dtype(model_type):
    """Also with heads whose width is not the target's by their number, as in Qwen3."""
    shape = replace(TINY, model_type=model_type, head_dim=16 if "qwen3" in model_type else 8)
    target = random_target(shape, 3, torch.bfloat16, CPU, 64)
    layer = target.text_model.layers[0]
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert matrices == shape.layer_parameters and target.dtype == torch.bfloat16
    assert target.embed_tokens.weight.numel() + target.lm_head.weight.numel() == shape.vocabulary_parameters
    assert torch.get_default_dtype() == torch.float32


def test_known_shapes_have_the_released_models_size():
    """Text weights in billions, from the released checkpoints; `tied` ones count the embedding once."""
    sizes = {n: s.num_layers * s.layer_parameters + s.vocabulary_parameters for n, s in shapes().items()}
    released = {"qwen2_5_vl_3b": 3.1, "qwen2_5_vl_7b": 7.6, "qwen2_5_vl_32b": 32.8, "qwen2_5_vl_72b": 72.7}
    released |= {
        "llama3_1_8b": 8.0,
        "llama3_2_1b": 1.2,
        "mistral_7b": 7.2,
        "qwen3_4b": 4.0,
        "qwen3_8b": 8.2,
        "qwen3_vl_8b": 8.2,
    }
    assert {name: round(sizes[name] / 1e9, 1) for name in released} == released
    assert "qwen3_30b_a3b" not in shapes() and shapes()["qwen3_4b"].head_dim == 128


def test_layers_that_fit_are_limited_by_shape_and_memory():
    assert layers_that_fit(TINY, torch.float32, CPU) == 4
    huge = replace(TINY, name="huge", hidden_size=2**20, intermediate_size=2**22, num_heads=1, num_kv_heads=1, head_dim=2**20)
    with refused("--shape", "cpu"):
        layers_that_fit(huge, torch.float32, CPU)


def test_an_unknown_shape_lists_the_known_ones():
    with refused("--shape 'qwen9'", "qwen2_5_vl_3b"):
        shape_named("qwen9")


def test_the_command_writes_json_and_prints_both_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(shapes(), "tiny", TINY)
    out = tmp_path / "costs.json"
    grid = ["--nodes", "1,2", "--widths", "1", "--contexts", "8", "--repeats", "1", "--dtype", "fp32", "--device", "cpu"]
    main(["costs", "--shape", "tiny", *grid, "--out", str(out)])
    assert json.loads(out.read_text())["layers_measured"] == 2  # the default on a CPU
    shown = capsys.readouterr().out
    assert "target pass, ms: nodes" in shown and "draft level, ms: width" in shown


def test_times_by_bandwidth_by_hand(monkeypatch, capsys):
    """Weights and cached keys and values in bytes, over 1 GB/s."""
    found = roofline_costs(TINY, torch.bfloat16, 1.0, nodes=[3], widths=[2], contexts=[8])
    head = TINY.vocab_size * TINY.hidden_size
    row = 2 * TINY.num_kv_heads * TINY.head_dim
    layers = TINY.num_layers * (TINY.layer_parameters + 11 * row)
    assert found["verify"] == [{"nodes": 3, "context": 8, "seconds": pytest.approx(2e-9 * (layers + head))}]
    draft = TINY.layer_parameters + 10 * row + 2 * TINY.hidden_size**2 + head
    assert found["draft"] == [{"width": 2, "context": 8, "seconds": pytest.approx(2e-9 * draft)}]
    monkeypatch.setitem(shapes(), "tiny", TINY)
    main(["costs", "--shape", "tiny", "--bandwidth", "2000", "--contexts", "8"])
    assert "2000 GB/s; not measured" in capsys.readouterr().out
    with refused("bandwidth: 0.0", "gigabytes per second"):
        main(["costs", "--shape", "tiny", "--bandwidth", "0"])


def report_of(host_s, rounds=10, levels=4.0, nodes=8.0):
    phases = dict.fromkeys(("accept", "commit", "policy", "other"), host_s / 4) | {"verify": 3 * host_s}
    phases |= {"draft_prefill": 0.0, "draft_steps": host_s, "vision": 9.0, "target_prefill": 9.0}
    part = {"draft_steps_per_round": levels, "nodes_per_round": nodes, "rounds": rounds, "time_s": phases}
    return {"target": "small", "policies": {"sage": part, "autoregressive": part | {"draft_steps_per_round": 0.0}}}


def test_projection_by_hand():
    """A round: a pass over 9 nodes, 90 ms on the line from 10 at 1 to 100 at 10, and 4 levels of width 2, 5 ms each."""
    tables = {
        "kind": "costs",
        "verify": [{"nodes": n, "context": 8, "seconds": 0.01 * n} for n in (1, 10)],
        "draft": [{"width": w, "context": 8, "seconds": 0.0025 * w} for w in (1, 4)],
    }
    [row] = project(report_of(host_s=0.1), tables)
    assert row["compute_s"] == pytest.approx(0.09 + 4 * 0.005) and row["bookkeeping_s"] == pytest.approx(0.01)
    assert row["share"] == pytest.approx(0.01 / 0.12)
    assert row["measured_share"] == pytest.approx(1 / 5)
    assert format_projection([row], "qwen", "small").splitlines()[-1].split() == ["sage", "10.000", "20.0%", "8.33%"]
    with refused("--project", "report.json"):
        project(tables, tables)


def test_the_command_projects_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(shapes(), "tiny", TINY)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report_of(host_s=0.1)))
    grid = ["--nodes", "1,2", "--widths", "1,2", "--contexts", "8", "--repeats", "1", "--dtype", "fp32", "--device", "cpu"]
    main(["costs", "--shape", "tiny", *grid, "--project", str(file)])
    assert "measured, and projected to tiny" in capsys.readouterr().out
    for content, parts in ((None, [str(file)]), ("{", [str(file), "JSON"]), ("[]", ["report.json"])):
        file.unlink() if content is None else file.write_text(content)
        with refused("--project", *parts):
            main(["costs", "--shape", "tiny", *grid, "--project", str(file)])


@pytest.mark.parametrize("text", ["1,x", "0", ""])
def test_a_grid_must_hold_counts(text):
    with refused(repr(text)):
        main(["costs", "--shape", "qwen2_5_vl_3b", "--layers", "1", "--nodes", text])
