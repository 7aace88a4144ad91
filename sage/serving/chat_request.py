"""The body of a chat completion request -> options and messages. Every field is used, ignored or refused by name.

Does not own: images (sage.serving.media), the chat template and the context length (sage.serving.service).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Annotated, Any, NoReturn

from sage.decoding.settings import Sampling
from sage.io.names import did_you_mean
from sage.io.ranges import FieldError, PositiveInt, Range, check_fields
from sage.serving.errors import ApiError, invalid

MIN_TEMPERATURE = 1e-6  # below it, logits overflow float32
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
NUM_SEED_BITS = 63
PENALTY = Range(ge=0.01, le=100, remedy="1 is off")
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "request_id"),
)
ONLY = {  # fields that have an effect in other servers -> the values without one
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "echo": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
NO_CONTENT_FIELDS = ("name", "refusal", "annotations", "reasoning_content", "reasoning")  # of a message; not rendered
EMPTY_FIELDS = ("tool_calls", "function_call", "audio", "tool_call_id")  # of a message; must be empty
Part = dict[str, Any]
Message = dict[str, Any]


@dataclass(kw_only=True)
class ChatOptions:
    """Options of a request under their names in the API.

    Attributes:
        max_tokens: maximum length of the answer; None: what is left of the context.
        ignore_eos: whether the answer has exactly `max_tokens` tokens.
        return_token_ids: whether token ids are returned besides the text, as vLLM does.
    """

    temperature: Annotated[float, Range(ge=0, le=2, remedy="0 is greedy decoding")] = 0.0
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Range(ge=-1, remedy="0 and -1 keep all tokens")] = 0
    min_p: Annotated[float, Range(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, PENALTY] = 1.0
    seed: Annotated[int, Range(ge=-(2**NUM_SEED_BITS), lt=2**NUM_SEED_BITS)] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    min_tokens: Annotated[int, Range(ge=0)] = 0
    ignore_eos: bool = False
    return_token_ids: bool = False
    stream: bool = False


@dataclass
class ChatRequest:
    """A request whose fields are valid.

    Attributes:
        messages: a list of parts each: `text`, `image` with `url`, `video` with `urls` of frames and `fps`; `where` names the
            field of the body for messages to the client.
        includes_usage: whether a stream ends with a chunk of usage.
    """

    options: ChatOptions
    messages: list[Message]
    stop: tuple[str, ...] = ()
    includes_usage: bool = False

    @property
    def max_tokens(self) -> int | None:
        """Maximum length of the answer in tokens; None if not given."""
        newer = self.options.max_completion_tokens
        return self.options.max_tokens if newer is None else newer

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Returns the sampling parameters for an answer of at most `max_new_tokens`."""
        options = self.options
        return Sampling(
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens if options.ignore_eos else min(options.min_tokens, max_new_tokens),
            temperature=float(options.temperature),
            top_k=max(options.top_k, 0),
            top_p=float(options.top_p),
            min_p=float(options.min_p),
            repetition_penalty=float(options.repetition_penalty),
            seed=secrets.randbits(32) if options.seed is None else options.seed,
            stop=self.stop,
        )


def parse_json(body: bytes) -> Any:
    """Returns the JSON of a body; ApiError if it is none."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"body: not valid JSON ({reason})", code="invalid_json") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def read_request(data: Any, model: str) -> ChatRequest:
    """Checks the JSON of a request; ApiError for the first field that is not allowed.

    Args:
        model: name of the served target.
    """
    if not isinstance(data, dict):
        raise invalid(f"body: {_kind(data)}; give a JSON object with messages")
    given = {name: value for name, value in data.items() if value is not None}
    _check_model(given.pop("model", model), model)
    messages = _messages(given.pop("messages", None))
    stop = _stop(given.pop("stop", ()))
    stream_options = given.pop("stream_options", {})
    names = [one.name for one in fields(ChatOptions)]
    options = _options({name: given.pop(name) for name in names if name in given})
    request = ChatRequest(options, messages, stop, _includes_usage(stream_options))
    _refuse_others(given, [*names, "model", "messages", "stop", "stream_options"])
    return request


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _check_model(value: Any, model: str) -> None:
    if not isinstance(value, str):
        raise invalid(f"model: {_kind(value)}; give {model!r}", "model")
    if value != model:
        message = f"model: {value!r} is not served; give {model!r}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")


def _options(given: dict[str, Any]) -> ChatOptions:
    options = ChatOptions(**given)
    try:
        check_fields(options)
    except FieldError as error:
        raise invalid(str(error), error.key) from error
    if 0 < options.temperature < MIN_TEMPERATURE:
        raise invalid(f"temperature: {options.temperature} is not allowed; give 0 or at least {MIN_TEMPERATURE}", "temperature")
    if None not in (options.max_tokens, options.max_completion_tokens) and options.max_tokens != options.max_completion_tokens:
        raise invalid("max_tokens: differs from max_completion_tokens; give one of the two", "max_tokens")
    if options.ignore_eos and options.max_tokens is None and options.max_completion_tokens is None:
        raise invalid("ignore_eos: the answer would have no end; give max_tokens as well", "ignore_eos")
    return options


def _stop(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) for text in found):
        raise invalid("stop: give a string or an array of strings", "stop")
    if len(found) > MAX_STOPS:
        raise invalid(f"stop: {len(found)} strings, allowed: at most {MAX_STOPS}", "stop")
    for text in found:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise invalid(f"stop: a string of {len(text)} characters, allowed: 1 to {MAX_STOP_LENGTH}", "stop")
        _check_unicode(text, "stop")
    return tuple(found)


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{where}: invalid Unicode {text[error.start]!a}; give text in UTF-8", where) from error


def _includes_usage(value: Any) -> bool:
    known = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
    if not isinstance(value, dict) or value.keys() - known:
        raise invalid('stream_options: give an object such as {"include_usage": true}', "stream_options")
    if not all(isinstance(flag, (bool, type(None))) for flag in value.values()) or value.get("continuous_usage_stats"):
        raise invalid("stream_options: allowed: include_usage, true or false", "stream_options")
    return bool(value.get("include_usage"))


def _refuse_others(given: dict[str, Any], known: list[str]) -> None:
    for name, value in given.items():
        if name in IGNORED:
            continue
        if name not in ONLY:
            raise invalid(f"{name[:100]}: unknown field{did_you_mean(name[:100], [*known, *ONLY])}; remove it", name[:100])
        if not any(_same(value, allowed) for allowed in ONLY[name]):
            values = " or ".join(json.dumps(allowed) for allowed in ONLY[name])
            raise invalid(f"{name}: not supported; remove it{f' or give {values}' if values else ''}", name)


def _same(value: Any, allowed: Any) -> bool:
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        problem = "missing" if value is None else "empty" if value == [] else _kind(value)
        raise invalid(f'messages: {problem}; give an array such as [{{"role": "user", "content": "Hello"}}]', "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise invalid(f"{where}: {_kind(message)}; give an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role: {role!r} is not allowed; give one of {', '.join(ROLES)}", f"{where}.role")
    for name in message.keys() - {"role", "content", *NO_CONTENT_FIELDS}:
        if name not in EMPTY_FIELDS or message[name]:
            raise invalid(f"{where}.{name[:100]}: not supported; give role and content", f"{where}.{name[:100]}")
    return {"role": ROLES[role], "content": list(_parts(message.get("content"), f"{where}.content"))}


def _parts(content: Any, where: str) -> Iterator[Part]:
    if isinstance(content, str):
        _check_unicode(content, where)
        yield {"type": "text", "text": content}
        return
    if not isinstance(content, list) or not content:
        raise invalid(f"{where}: {'empty' if content == [] else _kind(content)}; give a string or an array of parts", where)
    for number, part in enumerate(content):
        yield _part(part, f"{where}[{number}]")


def _part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise invalid(f"{where}.text: {_kind(text)}; give a string", where)
        _check_unicode(text, where)
        return {"type": "text", "text": text}
    if kind == "image_url":
        return {"type": "image", "url": _url(part, "image_url", where), "where": where}
    if kind == "video_url":  # as vLLM takes frames: data:video/jpeg;base64,FRAME,FRAME
        header, _, frames = _url(part, "video_url", where).partition(",")
        if header != "data:video/jpeg;base64":
            raise invalid(f"{where}.video_url: give frames, data:video/jpeg;base64,FRAME,FRAME, or a part of type video", where)
        urls = [f"data:image/jpeg;base64,{frame}" for frame in frames.split(",")]
        return {"type": "video", "urls": urls, "fps": None, "where": where}
    if kind == "video":
        return {"type": "video", "urls": _frames(part.get("video"), where), "fps": _fps(part, where), "where": where}
    raise invalid(f"{where}: give an object of type text, image_url or video", where)


def _url(part: Part, key: str, where: str) -> str:
    found = part.get(key)
    url = found.get("url") if isinstance(found, dict) else found
    if not isinstance(url, str):
        raise invalid(f'{where}.{key}: give an object such as {{"url": "data:image/png;base64,..."}}', where)
    return url


def _frames(frames: Any, where: str) -> list[str]:
    if not isinstance(frames, list) or not frames or not all(isinstance(url, str) for url in frames):
        raise invalid(f"{where}.video: give an array of frames as data URLs", where)
    return frames


def _fps(part: Part, where: str) -> float | None:
    fps = part.get("fps")
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps <= 1000:
        raise invalid(f"{where}.fps: give frames per second, above 0 and at most 1000", where)
    return float(fps)
