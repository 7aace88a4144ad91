"""What users have reported, by kind: the table of the tests that hold its right value."""

from __future__ import annotations

from pathlib import Path

import pytest

REPORTED = {
    "added tokens in answers": "data/test_user_files.py::test_keys_are_rendered_by_the_template",
    "check of EAGLE-3.1": "checkpoints/test_export_check.py::test_a_folder_of_eagle_3_1_is_valid",
    "deep JSON": "data/test_user_files.py::test_bad_rows_are_skipped_one_by_one",
    "layout of FineVision": "data/test_user_files.py::test_public_layouts_are_recognized_and_trained",
    "gray floats": "data/test_media_files.py::test_odd_images_are_opened_with_the_size_of_their_header",
    "GuideLLM": "serving/test_api.py::test_the_openai_client_gets_the_texts_of_generate_over_several_turns_with_images",
    "tags of HTML": "data/test_user_files.py::test_placeholders_count_where_the_layout_puts_them",
    "import of NaN": "checkpoints/test_export_check.py::test_every_error_is_found_and_named",
    "max_pixels": "data/test_media_files.py::test_limits_of_pixels_scale_images",
    "server of a hybrid Qwen3": "data/test_server_answers.py::test_request_states_every_option_that_determines_the_answer",
    "special tokens of own answers": "targets/test_text.py::test_own_answers_of_regenerated_answers_are_all_own",
    "role and content as conversations": "data/test_user_files.py::test_public_layouts_are_recognized_and_trained",
    "shards": "data/test_user_files.py::test_every_form_of_a_path_is_read",
    "silent fields": "data/test_user_files.py::test_keys_that_the_template_does_not_render_are_refused",
    "token beyond the vocabulary": "targets/test_refusals.py::test_targets_whose_files_do_not_fit_together",
    "rotation of videos": "drafts/test_media.py::test_videos_of_phones_are_turned_and_mirrored_as_their_files_say",
    "names on the command line": "cli/test_names.py::test_any_path_is_read_as_the_shell_delivers_it",
}


@pytest.mark.parametrize("kind", REPORTED)
def test_what_was_reported_has_a_test(kind: str) -> None:
    file, _, name = REPORTED[kind].partition("::")
    assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
