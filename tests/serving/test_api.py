"""The API as its clients use it: httpx, curl and the openai package; texts are those of `sage.generate`."""

import json
from typing import Any

import pytest
import torch
from support.serving_helpers import HELLO, MODEL, Running, image_url, with_images

import sage


def alone(server: Running, messages: Any, **options: Any) -> Any:
    """The answer without a server."""
    target = server.target
    return sage.generate(target, None, target.prepare(messages), policy="autoregressive", **options)


def opened_parts(content: Any) -> Any:
    """The content of a message as `Target.prepare` takes it."""
    if isinstance(content, str):
        return content
    return [{"type": "image", "image": part["image_url"]["url"]} if "image_url" in part else part for part in content]


@pytest.mark.slow
def test_the_openai_client_gets_the_texts_of_generate_over_several_turns_with_images(server: Running) -> None:
    import openai  # takes a second

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL
    messages: list[Any] = []
    for question, color in (("What is this?", "red"), ("And this?", "blue")):
        messages += with_images(question, image_url(color=color))
        whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, seed=3, temperature=0.8)
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=12,
                seed=3,
                temperature=0.8,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        opened = [{**message, "content": opened_parts(message["content"])} for message in messages]
        expected = alone(server, opened, max_new_tokens=12, seed=3, temperature=0.8)
        assert whole.choices[0].message.content == text == expected.text
        assert whole.usage and whole.usage == chunks[-1].usage and whole.usage.completion_tokens == len(expected.tokens)
        rounds = whole.usage.model_extra["speculation"]
        assert 0 <= rounds["rounds"] + rounds["accepted_tokens"] - (len(expected.tokens) - 1) <= 1  # no bonus token after EOS
        messages.append(whole.choices[0].message.model_dump())
        messages[-1]["content"] = messages[-1]["content"] or "nothing"


def test_fields_of_common_clients_change_nothing(server: Running) -> None:
    messages = [*HELLO, {"role": "assistant", "content": ""}, {"role": "user", "content": "<|im_end|><|image_pad|>"}]
    expected = server.chat(messages).json()["choices"]
    sent = [{**HELLO[0], "type": "text", "id": "1", "timestamp": 1}, {"role": "assistant", "content": None}, messages[2]]
    fields: dict[str, Any] = {
        "include_stop_str_in_output": False,
        "priority": 1,
        "cache_salt": "x",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": False, "media": [[], [], []]},  # unknown to the template
        "mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 1003520},
        "foo": None,
        "max_tokens": 8.0,
    }
    assert server.chat(sent, **fields).json()["choices"] == expected
    assert server.chat(with_images("?", image_url().rstrip("=")), **fields).status_code == 200
    assert server.chat(HELLO, chat_template_kwargs={"messages": []}).status_code == 400


def test_completions_of_a_text_and_of_its_tokens(server: Running) -> None:
    target, fields = server.target, {"max_tokens": 6, "model": MODEL}
    ids = target.processor.tokens_of("This is a red")
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    expected = sage.generate(target, None, inputs, policy="autoregressive", max_new_tokens=6)
    for prompt in ("This is a red", ["This is a red"], ids, [ids]):
        found = server.client.post("/v1/completions", json={"prompt": prompt, **fields}).json()
        assert found["choices"][0]["text"] == expected.text and found["object"] == "text_completion"
    image = target.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for prompt in ([10**9], [image], "<|image_pad|>"):
        assert server.client.post("/v1/completions", json={"prompt": prompt, **fields}).status_code == 400
    stream = server.client.post("/v1/completions", json={"prompt": ids, "stream": True, **fields}).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected.text


def merged(reply: Any, is_streamed: bool) -> Any:
    """The choice of an answer, whose lists a stream has in parts."""
    if not is_streamed:
        return reply.json()["choices"][0]
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    found: dict[str, list[Any]] = {}
    for choice in (event["choices"][0] for event in events):
        for key, values in (*(choice["logprobs"] or {}).items(), ("token_ids", choice["token_ids"])):
            found.setdefault(key, []).extend(values or ())
    return {"token_ids": found.pop("token_ids"), "logprobs": found}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_logprobs_are_those_of_the_target(server: Running, is_streamed: bool) -> None:
    tokenizer = server.target.processor.tokenizer
    fields = {"stream": is_streamed, "return_token_ids": True, "seed": 1, "temperature": 1.0}
    ids = server.target.processor.tokens_of("This is a red circle in the upper left, below a small blue square. What else?")
    text = {"prompt": ids, "max_tokens": 5, "logprobs": 2, "echo": True}
    found = merged(server.client.post("/v1/completions", json={**text, **fields}), is_streamed)
    whole, scores = [*ids, *found["token_ids"]], found["logprobs"]
    with torch.inference_mode():
        expected = server.target.model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    own = expected[:-1].gather(1, torch.tensor(whole)[1:, None])[:, 0]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None and len(ids) > 16
    assert torch.tensor(scores["token_logprobs"][1:]) == pytest.approx(own, abs=1e-4)
    assert scores["tokens"] == [tokenizer.decode([number]) for number in whole]
    assert scores["text_offset"][-1] == sum(map(len, scores["tokens"][:-1]))
    for top, row in zip(scores["top_logprobs"][1:], expected, strict=False):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
    chat = merged(server.chat(logprobs=True, top_logprobs=2, **fields), is_streamed)
    content = chat["logprobs"]["content"]
    assert [one["token"] for one in content] == [tokenizer.decode([number]) for number in chat["token_ids"]]
    assert all(len(one["top_logprobs"]) == 2 and one["logprob"] < 0 for one in content)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_ends_the_text_before_it(server: Running, is_streamed: bool) -> None:
    text = alone(server, HELLO, max_new_tokens=24).text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    response = server.chat(max_tokens=24, stop=stop, stream=is_streamed)
    if is_streamed:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        found = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        reason = events[-1]["choices"][0]["finish_reason"]
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        choice = response.json()["choices"][0]
        found, reason = choice["message"]["content"], choice["finish_reason"]
    assert (found, reason) == (text[: text.index(stop)], "stop")


def test_video_frames_and_several_images(server: Running) -> None:
    video = {"type": "video", "video": [image_url(color=color) for color in ("red", "green")], "fps": 2}
    frames = "data:video/jpeg;base64," + ",".join(image_url(kind="JPEG").partition(",")[2] for _ in range(2))
    parts = [video, {"type": "video_url", "video_url": {"url": frames}}]
    for part in parts:
        found = server.chat([{"role": "user", "content": [part, {"type": "text", "text": "What happens?"}]}])
        assert found.status_code == 200, found.text
    one, two = (server.chat(with_images("What?", *[image_url()] * count)).json()["usage"] for count in (1, 2))
    assert two["prompt_tokens"] > one["prompt_tokens"]


def test_health_models_metrics_and_other_paths(server: Running) -> None:
    server.chat()
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 400
    schemas = server.client.get("/openapi.json").json()["components"]["schemas"]
    assert "messages" in schemas["ChatRequest"]["required"] and "prompt" in schemas["TextRequest"]["required"]
    metrics = server.client.get("/metrics").text
    for name in (
        "sage_generated_tokens_total",
        'sage_responses_total{status="200"}',
        'stage="verify"',
        "sage_waiting_requests 0.0",
        f'sage_model_info{{name="{MODEL}"}}',
        "sage_prompt_length_sum",
        "sage_token_seconds_count",
    ):
        assert name in metrics
    for method, path, status in (("GET", "/v1/chat/completions", 405), ("GET", "/", 404), ("GET", "/v1/models/gone", 404)):
        response = server.client.request(method, path)
        assert response.status_code == status and "\n" not in response.json()["error"]["message"]


@pytest.mark.slow
def test_requests_without_a_seed_differ(server: Running) -> None:
    texts = {server.chat(temperature=1.5, max_tokens=16).json()["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(texts) > 1
