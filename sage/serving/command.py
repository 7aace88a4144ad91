"""sage-serve: answers chat completion requests with speculative decoding, behind OpenAI's API.

Imports torch after the command line is checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage.commands import cli
from sage.io.ranges import from_attributes
from sage.serving.settings import ServerLimits
from sage.trees import AUTOREGRESSIVE, DEFAULT_POLICY, POLICIES, check_name

if TYPE_CHECKING:
    from sage.drafts.draft import Draft
    from sage.serving.decoders import Plan
    from sage.serving.decoding import Decoding
    from sage.serving.service import Service
    from sage.targets import Target

DESCRIPTION = "Serves a target with its draft behind OpenAI's API: /v1/chat/completions, /v1/models, /health, /metrics."
EPILOG = """Example:
  sage-serve --draft runs/demo_pocket_qwen2_5_vl --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

A first SIGTERM or Ctrl-C lets answers in progress finish, a second one ends the process. docs/serving.md describes the API."""
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra `serve`
KEY_VARIABLE = "SAGE_API_KEY"
MAX_PORT = 65535


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = cli.new_parser("sage-serve", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    cli.add_model_options(parser)
    text = f"one of {', '.join(POLICIES)} (default: {DEFAULT_POLICY}, without a draft {AUTOREGRESSIVE})"
    add("--policy", default=None, help=text)
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="port (default: %(default)s; 0: a free one)")
    add("--model-name", metavar="NAME", help="name of the target in the API (default: its folder or hub id)")
    add("--api-key", metavar="KEY", help=f"key that clients must send (default: the variable {KEY_VARIABLE}, if set)")
    text = "hosts that images may be downloaded from, separated by commas (default: none; clients send images as data URLs)"
    add("--allow-remote-media", metavar="HOST,..", default="", help=text)
    cli.add_settings(parser, ServerLimits)
    cli.add_load_options(parser, cli.FAST_DTYPE)
    return parser.parse_args(argv)


def main() -> None:
    """Console entry point."""

    def run() -> int:
        args = parse_args()
        limits = check(args)
        return _serve(args, limits)

    sys.exit(cli.run(run))


def check(args: argparse.Namespace) -> ServerLimits:
    """Refuses mistakes of the command line before anything is loaded; imports no torch.

    Raises:
        ValueError: packages that are not installed, an unknown policy, a number out of range, a key or a host that is none, or
            a draft or target that is missing.
    """
    limits = from_attributes(ServerLimits, args)
    check_name(policy_of(args))
    if policy_of(args) != AUTOREGRESSIVE and not args.draft:
        message = f"--draft: missing, and the policy {args.policy!r} needs one"
        raise ValueError(f"{message}; give a draft folder or --policy {AUTOREGRESSIVE}")
    if not 0 <= args.port <= MAX_PORT:
        raise ValueError(f"--port: {args.port} is not allowed; give an integer of at least 0 and at most {MAX_PORT}")
    key = api_key(args)
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("--api-key: has a line break, a blank or another character that no key has")
    for host in allowed_hosts(args):
        if not host or not host.isascii() or set(host) & set("/:@*?# "):
            raise ValueError(f"--allow-remote-media: {host!r} is not a host; give names such as images.example.com")
    cli.named_models(args)
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"sage-serve: {', '.join(missing)} not installed; pip install 'sage-draft[serve]'")
    return limits


def policy_of(args: argparse.Namespace) -> str:
    """Returns the name of the policy."""
    return args.policy or (DEFAULT_POLICY if args.draft else AUTOREGRESSIVE)


def api_key(args: argparse.Namespace) -> str:
    """Returns the key that clients must send; empty: none."""
    return args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE, "")


def allowed_hosts(args: argparse.Namespace) -> list[str]:
    """Returns the hosts that images may be downloaded from, in lower case."""
    return [host.strip().lower() for host in args.allow_remote_media.split(",")] if args.allow_remote_media else []


def _serve(args: argparse.Namespace, limits: ServerLimits) -> int:
    """Serves until a signal; returns the exit code."""
    from sage.runtime.timing import frozen_heap
    from sage.serving.server import Server, address_of, bind

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the server listens
    with bind(args.host, args.port) as bound:
        service = _load(args, limits, is_local=_is_loopback(bound))
        try:
            if not (service.api_key or service.is_local):
                note = f"everyone who reaches it can use the server; give --api-key or set {KEY_VARIABLE}"
                print(f"warning: --host {args.host}: {note}", file=sys.stderr)
            line = f"sage-serve: {address_of(bound)}/v1 serves {service.model}: up to {limits.max_requests} requests"
            line += f" of {service.max_context} tokens each, policy {policy_of(args)}"
            with frozen_heap():
                Server(service, lambda: print(line, flush=True)).run(sockets=[bound])
        finally:
            service.close()
        return cli.EXIT_CRASH if service.scheduler.has_failed else cli.EXIT_DONE


def _is_loopback(bound: socket.socket) -> bool:
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def _load(args: argparse.Namespace, limits: ServerLimits, is_local: bool) -> Service:
    """Starts the decoding process, and loads what the server itself needs meanwhile: the processor."""
    import torch

    from sage.serving.decoding import Decoding
    from sage.serving.remote import RemoteMedia
    from sage.targets.loading import load_processor

    torch.set_num_threads(1)  # preparation has threads of its own, and the decoding process needs the processors
    path, folder = cli.find_models(args)
    decoding = Decoding(_load_plan, args, path, folder, limits)
    try:
        processor = load_processor(path)
        name = args.model_name or (path if not Path(path).exists() else Path(path).resolve().name)
        remote = RemoteMedia(allowed_hosts(args), limits.max_body_bytes)
        return _service(decoding, processor, name, limits, api_key=api_key(args), remote=remote, is_local=is_local)
    except BaseException:
        decoding.kill()
        raise


def _load_plan(args: argparse.Namespace, path: str, folder: Path | None, limits: ServerLimits) -> Plan:
    """Loads target and draft, in the decoding process."""
    from transformers.utils import logging

    import sage
    from sage.runtime.pass_modes import MANY_ANSWERS, resolve_pass_mode
    from sage.serving.decoders import plan_decoding

    logging.disable_progress_bar()
    target = sage.load_target(path, passes=args.passes, **cli.load_options(args, cpu_dtype="float32"))
    target.passes = resolve_pass_mode(args.passes, target.device.type, MANY_ANSWERS, target.is_whole)
    draft = sage.load_draft(folder, target) if folder is not None else None
    return plan_decoding(target, draft, policy_of(args), limits)


def _service(decoding: Decoding, processor: Any, model: str, limits: ServerLimits, **options: Any) -> Service:
    """Waits until `decoding` has loaded; `options` are further fields of `Service`."""
    from sage.serving.metrics import Metrics
    from sage.serving.scheduler import Scheduler
    from sage.serving.service import Service

    max_context, end_token_ids = decoding.wait()
    metrics = Metrics()
    scheduler = Scheduler(decoding, limits.max_requests, limits.queue, metrics)
    return Service(processor, model, end_token_ids, scheduler, limits, max_context, metrics, **options)


def new_service(target: Target, draft: Draft | None, policy: str, limits: ServerLimits, model: str, **options: Any) -> Service:
    """Plans the caches, warms up and starts a decoding thread; `options` are further fields of `Service`.

    Raises:
        ValueError: the caches do not fit, the context is longer than the target's, or the target has no chat template.
    """
    from sage.serving.decoders import plan_decoding
    from sage.serving.decoding import Decoding

    if target.processor is None:
        raise ValueError("target: has no processor, so it takes no messages; use sage.load_target(path)")
    decoding = Decoding(plan_decoding, target, draft, policy, limits, in_process=False)
    return _service(decoding, target.processor, model, limits, **options)
