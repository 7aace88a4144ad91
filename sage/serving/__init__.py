"""An OpenAI-compatible server: `sage-serve`, `python -m sage.serving`. The only room that imports FastAPI, uvicorn and
prometheus_client, which the extra `serve` installs.

    command.py        options, checks; settings.py limits
    bodies.py         bodies of requests, within limits
    request.py        a body -> options; chat_request.py messages, media.py their images
    service.py        loading; a body -> prompt tensors
    scheduler.py      the queue; requests on their way to the decoding process and back
    decoding.py       that process
    completion.py     tokens -> text, chunks, usage
    app.py            routes, keys and hosts; one request and its answer; logs.py the log of requests
    server.py         connections, signals
"""
