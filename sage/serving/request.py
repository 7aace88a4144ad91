"""The body of a request as a pydantic model: options of an answer, and messages or a text. Images are opened as they are read.

Every field is used, ignored or refused by name.
"""

from __future__ import annotations

import base64
import io
import json
import secrets
from abc import abstractmethod
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from PIL import Image
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
from sage.inputs.processing import Processor
from sage.io.ranges import did_you_mean
from sage.serving.errors import ApiError, invalid
from sage.serving.media import MediaReader

FRAMES = "data:video/jpeg;base64"
MAX_MESSAGES, MAX_PARTS = 4096, 1024
MIN_TEMPERATURE = 1e-6  # below it, logits overflow float32
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
NUM_SEED_BITS = 63
MAX_QUOTED = 100  # characters of a value in a message
NUM_PART = 4  # names that lead to a part: messages, its number, content, its number
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "request_id", "priority", "cache_salt"),
)
ONLY: dict[str, tuple[Any, ...]] = {  # fields that have an effect in other servers -> the values without one
    **dict.fromkeys(("n", "best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("top_logprobs", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("use_beam_search", "echo", "continue_final_message", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("audio", "prediction", "verbosity", "web_search_options", "suffix"), ()),
    **{"logit_bias": ({},), "reasoning_effort": ("none",), "modalities": (["text"],), "response_format": ({"type": "text"},)},
}
TOOLS = {"tools": "tool_choice", "functions": "function_call"}  # which have no effect where the choice is none


class Strict(BaseModel):
    """Values are not converted, as "1" to 1."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream contains besides the text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # which GuideLLM requests: the last chunk alone has the usage


class CompletionRequest(Strict):
    """A request; a field that is null has its default.

    Attributes:
        subject: the field of its prompt.
        default_tokens: `max_tokens` if it is not given.
        max_tokens: maximum length of the answer; None: what is left of the context.
        ignore_eos: whether the answer has exactly `max_tokens` tokens.
        return_token_ids: whether token ids are returned besides the text, as vLLM does.
        num_logprobs: most likely tokens whose log-probabilities are returned besides that of each token; None: neither.
    """

    subject: ClassVar[str]
    num_logprobs: ClassVar[Any]
    default_tokens: ClassVar[int | None] = None
    model_config = ConfigDict(extra="allow")
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
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("*", mode="before")
    @classmethod
    def _as_sent(cls, value: Any) -> Any:
        if value is None:
            raise PydanticUseDefault
        return int(value) if isinstance(value, float) and value.is_integer() else value  # as 8.0 for a number of tokens

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if 0 < self.temperature < MIN_TEMPERATURE:
            message = f"temperature: {self.temperature} is not allowed; give 0 or at least {MIN_TEMPERATURE}"
            raise invalid(message, "temperature")
        lengths = {length for length in (self.max_tokens, self.max_completion_tokens) if length is not None}
        if len(lengths) > 1:
            raise invalid("max_tokens: differs from max_completion_tokens; give one of the two", "max_tokens")
        self.max_tokens = max(lengths, default=self.default_tokens)
        if self.ignore_eos and self.max_tokens is None:
            raise invalid("ignore_eos: the answer would have no end; give max_tokens as well", "ignore_eos")
        return self

    @abstractmethod
    def num_characters(self) -> int:
        """Returns the length of the texts of the prompt."""

    @abstractmethod
    def prepared(self, processor: Processor) -> Any:
        """Returns the inputs of the target; ValueError for a prompt that has none."""

    def sampling(self, max_new_tokens: int) -> Sampling:
        """Returns the sampling parameters for an answer of at most `max_new_tokens`."""
        same = self.model_dump(include={"temperature", "top_p", "min_p", "repetition_penalty", "stop"})
        min_new_tokens = max_new_tokens if self.ignore_eos else min(self.min_tokens, max_new_tokens)
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return Sampling(
            max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, top_k=max(self.top_k, 0), seed=seed, **same
        )

    def check_unused(self, ignores_unknown: bool) -> None:
        """Refuses fields that are unknown, or that ask for what is not supported."""
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in ONLY and extra.get(TOOLS.get(name, "")) != "none":
                allowed = (None, *ONLY[name])
                if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed):
                    values = " or ".join(map(json.dumps, ONLY[name]))
                    raise invalid(f"{name}: not supported; remove it{f' or give {values}' if values else ''}", name)
            elif name not in (*IGNORED, *ONLY) and value is not None and not ignores_unknown:
                hint = did_you_mean(name[:MAX_QUOTED], [*type(self).model_fields, *ONLY])
                raise invalid(f"{name[:MAX_QUOTED]}: unknown field{hint}; remove it", name[:MAX_QUOTED])


class TextRequest(CompletionRequest):
    """A request for the continuation of a text, or of token ids, without a chat template."""

    subject, default_tokens = "prompt", 16
    prompt: Annotated[str | list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        return value[0] if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int) else value

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_characters(self) -> int:
        return len(self.prompt)

    def prepared(self, processor: Processor) -> Any:
        tokenizer, family = processor.tokenizer, processor.family
        ids = processor.tokens_of(self.prompt) if isinstance(self.prompt, str) else self.prompt
        media = tokenizer.convert_tokens_to_ids([*family.placeholders.values(), *family.slot_texts.values()])
        if token := next((number for number in ids if number >= len(tokenizer) or number in media), None):
            raise ValueError(f"token {token} is unknown, or stands for an image or video; send those as chat messages")
        example = processor.encode([(self.prompt if isinstance(self.prompt, str) else tuple(self.prompt), False)])
        del example["loss_mask"]
        return processor.collate([example])


# -- chats ----------------------------------------------------------------------------------------------------------------


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


def _refuse(value: Any) -> None:
    if value:
        raise ValueError("not supported; give role and content")


Unsupported = Annotated[None, BeforeValidator(_refuse)]


class Message(Strict):
    """A turn of the conversation; other fields have no effect on the prompt."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)]
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    tool_call_id: Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _with_parts(cls, message: Any) -> Any:
        """A string becomes a part; an assistant may have said nothing."""
        if not isinstance(message, dict):
            return message
        content = message.get("content")
        if not content and message.get("role") == "assistant":
            content = ""
        return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message

    def prepared(self) -> dict[str, Any]:
        """Returns the message as `Target.prepare` takes it."""
        content = [part.model_dump(exclude_none=True) | {"type": part.type.removesuffix("_url")} for part in self.content]
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class PixelBounds(Strict):
    """vLLM's arguments of an image processor, for images that they do not change."""

    model_config = ConfigDict(extra="forbid")
    min_pixels: int = 0
    max_pixels: int | None = None


class ChatRequest(CompletionRequest):
    """A request for the next message of a conversation.

    Attributes:
        chat_template_kwargs: further arguments of the chat template.
    """

    subject = "messages"
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    chat_template_kwargs: dict[str, Any] = {}
    mm_processor_kwargs: PixelBounds = PixelBounds()
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs: no effect without logprobs; set that to true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def _parts(self) -> Iterator[Part]:
        return (part for message in self.messages for part in message.content)

    def num_characters(self) -> int:
        return sum(len(part.text) for part in self._parts if isinstance(part, TextPart))

    def prepared(self, processor: Processor) -> Any:
        bounds = self.mm_processor_kwargs
        for part in self._parts:
            for image in [part.image] if isinstance(part, ImagePart) else getattr(part, "video", ()):
                count = image.width * image.height
                if not bounds.min_pixels <= count <= (bounds.max_pixels or count):
                    message = f"would resize {image.width}x{image.height} pixels; send the image resized"
                    raise invalid(f"mm_processor_kwargs: {message}", "mm_processor_kwargs")
        return processor.prepare([message.prepared() for message in self.messages], **self.chat_template_kwargs)


# -- bodies ---------------------------------------------------------------------------------------------------------------


def greeting_body(with_image: bool) -> bytearray:
    """Returns the body of a chat request for the warm-up."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "Hello"}]
    if with_image:
        Image.new("RGB", (64, 64)).save(file := io.BytesIO(), "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return bytearray(json.dumps({"messages": [{"role": "user", "content": content}]}).encode())


def read_request(
    kind: type[CompletionRequest], body: bytearray, model: str, reader: MediaReader, ignores_unknown: bool
) -> CompletionRequest:
    """Reads a request to the served `model`; ApiError for the first field that is not allowed."""
    try:
        request = kind.model_validate_json(body, context=reader)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from error
    request.check_unused(ignores_unknown)
    if request.model not in (None, "", model):
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
