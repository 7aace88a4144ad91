"""Targets: embedding and processing against Hugging Face; what holds for every family is in support/family_suite.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.data_helpers import save_target
from support.messages import refused
from support.models import make_inputs, make_llava, make_qwen
from support.processors import make_processor, random_image, user
from transformers.video_utils import VideoMetadata

import sage
import sage.inputs
from sage.targets.loading import load_processor


@pytest.fixture
def ready(tiny_target: sage.Target) -> sage.Target:
    return sage.Target(tiny_target.model, make_processor(tiny_target))


def test_video_frames_land_in_the_temporal_axis() -> None:
    """Two different frames form one patch row of Qwen2.5-VL: half of its values are from each frame."""
    target = make_qwen()
    processor = make_processor(target)
    first, second = random_image(8, 8, 1), random_image(8, 8, 2)
    video = processor.encode([(target.family.placeholders["video"], False)], videos=[[first, second]])
    stills = [
        processor.encode([(target.family.placeholders["image"], False)], images=[p])["pixel_values"] for p in (first, second)
    ]
    as_frames = video["pixel_values_videos"].view(-1, 3, 2, 16)
    for i, still in enumerate(stills):
        assert torch.equal(as_frames[:, :, i], still.view(-1, 3, 2, 16)[:, :, 0])
    assert video["video_grid_thw"].tolist() == [[1, 2, 2]]


def test_odd_frame_is_repeated_and_lengths_must_agree_for_llava() -> None:
    qwen, llava = make_qwen(), make_llava()
    video = make_processor(qwen).encode([(qwen.family.placeholders["video"], False)], videos=[[random_image(8, 8)] * 3])
    assert video["video_grid_thw"].tolist() == [[2, 2, 2]]
    with refused("video: ", "[2, 3] frames"):
        make_processor(llava).encode(
            [(llava.family.placeholders["video"] * 2, False)], videos=[[random_image(8, 8)] * 2, [random_image(8, 8)] * 3]
        )


def test_each_video_has_its_own_seconds_per_grid() -> None:
    target = make_qwen()
    processor = make_processor(target)
    videos = [{"type": "video", "video": [random_image(8, 8)] * 4, **rate} for rate in ({"fps": 1}, {}, {"fps": 4.0})]
    assert processor.prepare(user(*videos, "when?"))["second_per_grid_ts"].tolist() == [2.0, 1.0, 0.5]
    with refused("video: 1", "2 value(s) of fps"):
        processor.encode([(target.family.placeholders["video"], False)], videos=[[random_image(8, 8)] * 4], fps=[1.0, 2.0])


def test_seconds_of_a_video_file_equal_hugging_face(tmp_path: Path) -> None:
    """Of a minute with 48 frames, 16 are sampled: two of them, one temporal patch, are 7.5 s."""
    frames = [random_image(8, 8, i) for i in range(48)]
    frames[0].save(tmp_path / "minute.gif", save_all=True, append_images=frames[1:], duration=1250)
    inputs = make_processor(make_qwen()).prepare(user({"type": "video", "video": str(tmp_path / "minute.gif")}, "when?"))
    assert inputs["video_grid_thw"][0, 0] == 8
    theirs = VideoMetadata(total_num_frames=48, fps=0.8, frames_indices=list(range(1, 48, 3))).sampled_fps
    assert inputs["second_per_grid_ts"].tolist() == pytest.approx([7.5])
    assert inputs["second_per_grid_ts"].tolist() == pytest.approx([2 / theirs])


def test_only_the_segment_of_a_video_is_encoded(ready: sage.Target, tmp_path: Path) -> None:
    frames = [random_image(8, 8, i) for i in range(12)]
    for i, frame in enumerate(frames):
        frame.save(tmp_path / f"{i}.png")
    expected = ready.prepare(user({"type": "video", "video": frames[3:9], "fps": 3}, "what?"))
    for source in (frames, str(tmp_path)):
        found = ready.prepare(user({"type": "video", "video": source, "fps": 3, "start": 1, "end": 3}, "what?"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_videos_of_different_lengths_in_one_batch(ready: sage.Target) -> None:
    """The embeddings of each video equal those of the video alone, in order, without those of padded frames."""
    target, processor = ready, ready.processor
    text = (target.family.placeholders["video"], False)
    videos = [processor.encode([text], videos=[[random_image(8, 8, i) for i in range(n)]]) for n in (2, 5, 4)]
    slot = target.family.slots["video"]
    together = target.embed(processor.collate(videos)).visual[slot].embeds
    alone = [target.embed(processor.collate([video])).visual[slot].embeds for video in videos]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=0)
    assert len(together) == sum(int(video["input_ids"].shape[0]) for video in videos)


class TestMistakes:
    def test_empty_prompt(self, ready: sage.Target) -> None:
        with refused("prompt: empty"):
            ready.prepare(user("  "))

    def test_text_that_is_not_unicode(self, ready: sage.Target) -> None:
        """As an argument of a command that is not UTF-8, or half of a surrogate pair in JSON."""
        with refused("prompt: invalid Unicode"):
            ready.prepare(user("caf\udce9"))

    def test_numbers_of_placeholders_and_images_differ(self, ready: sage.Target) -> None:
        token = ready.family.placeholders["image"]
        with refused("prompt: ", repr(token)):
            ready.processor.encode([(f"see {token}", False)])
        with refused("prompt: 1", repr(token)):
            ready.processor.encode([("see", False)], images=[random_image(8, 8)])

    def test_missing_folder_and_unknown_family(self, tmp_path: Path) -> None:
        with refused("target: ", "nowhere: no such folder"):
            sage.load_target(tmp_path / "nowhere")
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        with pytest.raises(ValueError, match="^target: .*'bert' is not a known family; known: .*qwen2_5_vl"):
            sage.load_target(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with refused("target: ", "config.json"):
            sage.load_target(tmp_path)

    @pytest.mark.parametrize(
        ("family", "files"),
        [
            ("qwen2_5_vl", ["tokenizer.json", "tokenizer_config.json"]),
            ("llava_onevision", ["tokenizer.json"]),
            ("qwen2_5_vl", ["preprocessor_config.json"]),
        ],
    )
    def test_missing_processor_files(self, tmp_path: Path, family: str, files: list[str]) -> None:
        """For some families transformers creates an empty tokenizer if the files are missing."""
        folder = save_target(family, tmp_path / "target")
        for file in files:
            (folder / file).unlink()
        for load in (sage.load_target, lambda folder: load_processor(str(folder))):
            with pytest.raises(
                ValueError, match="^target: .*target: its tokenizer .*; copy the files that came with the model"
            ):
                load(folder)

    def test_another_models_tokenizer(self, tmp_path: Path) -> None:
        folder, other = (save_target(family, tmp_path / family) for family in ("qwen2_5_vl", "llava_onevision"))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((other / file).read_bytes())
        with refused("target: ", "'<|image_pad|>'", "tokenizer"):
            sage.load_target(folder)

    def test_unused_layers_are_reported(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = save_target("qwen2_5_vl", tmp_path / "target")
        state = load_file(folder / "model.safetensors")
        save_file(state | {"spare.weight": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
        sage.load_target(folder)
        assert "target: 1 of its tensors are not used: spare.weight" in caplog.text

    def test_prepare_needs_a_processor(self, tiny_qwen: sage.Target) -> None:
        with refused("target: ", "processor"):
            tiny_qwen.prepare(user("hello"))

    def test_text_and_pixels_differ(self, tiny_qwen: sage.Target) -> None:
        inputs = make_inputs(tiny_qwen)
        inputs["input_ids"] = inputs["input_ids"][:, :8]
        with refused("inputs: ", "4 visual embeddings"):
            tiny_qwen.embed(inputs)
