"""The body of a chat completion request as a pydantic model. Every field is used, ignored or refused by name.

Its images are opened by the `MediaReader` in the context. Does not own: the chat template and the context length
(sage.serving.service).
"""

from __future__ import annotations

import json
import secrets
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticUseDefault

from sage.decoding.settings import Sampling
from sage.io.names import did_you_mean
from sage.serving.errors import ApiError, invalid
from sage.serving.media import MediaReader

MIN_TEMPERATURE = 1e-6  # below it, logits overflow float32
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
NUM_SEED_BITS = 63
MAX_QUOTED = 100  # characters of a value in a message
NUM_PART = 4  # names that lead to a part: messages, its number, content, its number
FRAMES = "data:video/jpeg;base64"
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "request_id"),
)
ONLY: dict[str, tuple[Any, ...]] = {  # fields that have an effect in other servers -> the values without one
    **dict.fromkeys(("n", "best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("top_logprobs", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("logprobs", "use_beam_search", "echo", "continue_final_message"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("audio", "prediction", "verbosity", "web_search_options"), ()),
    **{"logit_bias": ({},), "reasoning_effort": ("none",), "modalities": (["text"],), "response_format": ({"type": "text"},)},
}


class Strict(BaseModel):
    """Values are not converted, as "1" to 1."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class TextPart(Strict):
    """A text in a message."""

    type: Literal["text"]
    text: str


def _url(value: Any) -> Any:
    """Returns the URL of `{"url": URL, "detail": ..}`, or of the URL itself."""
    return value.get("url") if isinstance(value, dict) else value


def _open(value: Any, info: ValidationInfo) -> Any:
    assert isinstance(info.context, MediaReader)
    return info.context.open(_url(value))


Opened = Annotated[Any, BeforeValidator(_open)]  # a PIL image, given its URL


class ImagePart(Strict):
    """An image in a message."""

    type: Literal["image_url"]
    image: Annotated[Opened, Field(alias="image_url")]


class VideoPart(Strict):
    """The frames of a video in a message: URLs, or as vLLM takes them, `data:video/jpeg;base64,FRAME,FRAME`."""

    type: Literal["video", "video_url"]
    video: Annotated[list[Opened], Field(min_length=1)]
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_frames(cls, part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "video":
            return part
        header, _, frames = str(_url(part.get("video_url"))).partition(",")
        if header != FRAMES:
            raise ValueError(f"video_url: give frames, {FRAMES},FRAME,FRAME, or a part of type video")
        return {"type": "video", "video": [f"data:image/jpeg;base64,{frame}" for frame in frames.split(",")]}


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _empty(value: Any) -> None:
    if value:
        raise ValueError("not supported; give role and content")


Unsupported = Annotated[None, BeforeValidator(_empty)]


class Message(Strict):
    """A turn of the conversation; fields without an effect on the prompt are accepted."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], Field(min_length=1), BeforeValidator(_as_parts)]
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    tool_call_id: Unsupported = None

    def prepared(self) -> dict[str, Any]:
        """Returns the message as `Target.prepare` takes it."""
        content = [part.model_dump(exclude_none=True) | {"type": part.type.removesuffix("_url")} for part in self.content]
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(Strict):
    """What a stream contains besides the text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # which GuideLLM requests: the last chunk alone has the usage


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class ChatRequest(Strict):
    """A request; a field that is null has its default.

    Attributes:
        max_tokens: maximum length of the answer; None: what is left of the context.
        ignore_eos: whether the answer has exactly `max_tokens` tokens.
        return_token_ids: whether token ids are returned besides the text, as vLLM does.
    """

    model_config = ConfigDict(extra="allow")
    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    seed: Annotated[int, Field(ge=-(2**NUM_SEED_BITS), lt=2**NUM_SEED_BITS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("*", mode="before")
    @classmethod
    def _null_is_the_default(cls, value: Any) -> Any:
        if value is None:
            raise PydanticUseDefault
        return value

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if 0 < self.temperature < MIN_TEMPERATURE:
            message = f"temperature: {self.temperature} is not allowed; give 0 or at least {MIN_TEMPERATURE}"
            raise invalid(message, "temperature")
        lengths = {length for length in (self.max_tokens, self.max_completion_tokens) if length is not None}
        if len(lengths) > 1:
            raise invalid("max_tokens: differs from max_completion_tokens; give one of the two", "max_tokens")
        if self.ignore_eos and not lengths:
            raise invalid("ignore_eos: the answer would have no end; give max_tokens as well", "ignore_eos")
        self.max_tokens = max(lengths, default=None)
        for name, value in (self.model_extra or {}).items():
            _check_unused(name, value)
        return self

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Returns the sampling parameters for an answer of at most `max_new_tokens`."""
        same = self.model_dump(include={"temperature", "top_p", "min_p", "repetition_penalty", "stop"})
        min_new_tokens = max_new_tokens if self.ignore_eos else min(self.min_tokens, max_new_tokens)
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return Sampling(
            max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, top_k=max(self.top_k, 0), seed=seed, **same
        )


def _check_unused(name: str, value: Any) -> None:
    """Refuses a field that is unknown, or that asks for what is not supported."""
    if name in IGNORED or value is None:
        return
    name = name[:MAX_QUOTED]
    if name not in ONLY:
        hint = did_you_mean(name, [*ChatRequest.model_fields, *ONLY])
        raise invalid(f"{name}: unknown field{hint}; remove it", name)
    if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in ONLY[name]):
        values = " or ".join(json.dumps(allowed) for allowed in ONLY[name])
        raise invalid(f"{name}: not supported; remove it{f' or give {values}' if values else ''}", name)


def read_request(body: bytes, model: str, reader: MediaReader) -> ChatRequest:
    """Reads a request; ApiError for the first field that is not allowed.

    Args:
        model: name of the served target.
    """
    try:
        request = ChatRequest.model_validate_json(body, context=reader)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from error
    if request.model not in (None, model):
        message = f"model: {request.model!r} is not served; give {model!r}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
    return request


def _refusal(problem: ErrorDetails) -> ApiError:
    """Returns the error for a problem that pydantic has found: where, the value, what is allowed."""
    if problem["type"] == "json_invalid":
        return invalid(f"body: not valid JSON ({problem['ctx']['error']})", code="invalid_json")
    reason, loc = problem["msg"].removeprefix("Value error, "), problem["loc"]
    if problem["type"] == "missing":
        reason = "missing, and required"
    elif problem["type"] != "value_error":
        reason = f"{repr(problem['input'])[:MAX_QUOTED]} is not allowed; {reason[0].lower()}{reason[1:]}"
    param = _where(loc[:NUM_PART] if loc[:1] == ("messages",) else loc[:1])  # a part of a message, or the field
    return invalid(f"{_where(loc) or 'body'}: {reason}", param or None)


def _where(loc: tuple[int | str, ...]) -> str:
    """Returns a place in the body: ("messages", 0, "content", 1, "text", "text") -> messages[0].content[1].text.

    pydantic names the type of a part after its number.
    """
    names = [*loc[:NUM_PART], *loc[NUM_PART + 1 :]] if loc[:1] == ("messages",) else loc
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name[:MAX_QUOTED]}" for name in names).removeprefix(".")
