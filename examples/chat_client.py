"""A chat about a picture with a running `sage-serve`: several questions, each with the conversation so far.

sage-serve --target pocket_qwen2_5_vl --port 8000
python examples/chat_client.py [URL]

Without a server, it starts one in this process.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path
from typing import Any

import openai

import sage
from sage.serving.server import running
from sage.serving.service import new_service
from sage.serving.settings import ServerLimits

PICTURE = Path(__file__).with_name("drawing.png")
QUESTIONS = ("What do you see?", "Which colors are there?")


def chat(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    image = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    messages: list[Any] = []
    for number, question in enumerate(QUESTIONS):
        content: list[Any] = [{"type": "text", "text": question}]
        if number == 0:
            content.insert(0, {"type": "image_url", "image_url": {"url": image}})
        messages.append({"role": "user", "content": content})
        stream = client.chat.completions.create(model=model, messages=messages, max_tokens=64, stream=True)
        text = ""
        print(f"> {question}")
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        print(text)
        messages.append({"role": "assistant", "content": text})


def main(url: str | None = None) -> None:
    if url is not None:
        return chat(url)
    target = sage.load_target("pocket_qwen2_5_vl")
    service = new_service(target, None, "autoregressive", ServerLimits(max_context=1024), "pocket")
    with running(service) as (_, own_url):
        chat(own_url)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", metavar="URL", help="address of a server, such as http://127.0.0.1:8000")
    main(parser.parse_args().url)
