"""The body of a chat completion request: messages, whose images are opened by the `MediaReader` in the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from PIL.Image import Image
from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from sage.inputs.processing import Processor
from sage.serving.errors import invalid
from sage.serving.media import MediaReader
from sage.serving.request import Request, Strict

FRAMES = "data:video/jpeg;base64"
MAX_MESSAGES, MAX_PARTS = 4096, 1024


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
    """A turn of the conversation; other fields have no effect on the prompt."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS), BeforeValidator(_as_parts)]
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    tool_call_id: Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _assistants_may_be_silent(cls, message: Any) -> Any:
        is_silent = isinstance(message, dict) and message.get("role") == "assistant" and not message.get("content")
        return message | {"content": ""} if is_silent else message

    def prepared(self) -> dict[str, Any]:
        """Returns the message as `Target.prepare` takes it."""
        content = [part.model_dump(exclude_none=True) | {"type": part.type.removesuffix("_url")} for part in self.content]
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class PixelBounds(Strict):
    """vLLM's arguments of an image processor, for images that they do not change."""

    model_config = ConfigDict(extra="forbid")
    min_pixels: int = 0
    max_pixels: int | None = None

    def check(self, images: Sequence[Image]) -> None:
        """Raises ApiError for images that would be resized."""
        for image in images:
            count = image.width * image.height
            if not self.min_pixels <= count <= (self.max_pixels or count):
                message = f"mm_processor_kwargs: would resize {image.width}x{image.height} pixels; send the image resized"
                raise invalid(message, "mm_processor_kwargs")


class ChatRequest(Request):
    """A request for the next message of a conversation.

    Attributes:
        chat_template_kwargs: further arguments of the chat template.
    """

    subject = "messages"
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    chat_template_kwargs: dict[str, Any] = {}
    mm_processor_kwargs: PixelBounds = PixelBounds()

    @property
    def _parts(self) -> list[Part]:
        return [part for message in self.messages for part in message.content]

    def num_characters(self) -> int:
        """Returns the length of all texts."""
        return sum(len(part.text) for part in self._parts if isinstance(part, TextPart))

    def prepared(self, processor: Processor) -> Any:
        """Returns the inputs of the target."""
        for part in self._parts:
            self.mm_processor_kwargs.check([part.image] if isinstance(part, ImagePart) else getattr(part, "video", ()))
        return processor.prepare([message.prepared() for message in self.messages], **self.chat_template_kwargs)
