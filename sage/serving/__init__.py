"""An OpenAI-compatible server: `sage-serve`, `python -m sage.serving`. The only room that imports FastAPI, uvicorn and
prometheus_client, which the extra `serve` installs.

A request passes app.py (HTTP), request.py (its body), service.py (prompt tensors), scheduler.py (the queue), decoding.py (a
process of its own) and completion.py (text).
"""
