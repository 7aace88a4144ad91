"""sage-serve: answers chat completion requests with speculative decoding, behind OpenAI's API.

Imports torch after the command line is checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import shlex
import signal
import sys
from pathlib import Path

from sage.commands import cli
from sage.io.ranges import from_attributes
from sage.serving.settings import LEVELS, ServerLimits
from sage.trees import AUTOREGRESSIVE, DEFAULT_POLICY, POLICIES, check_name

DESCRIPTION = "Serves a target with its draft behind OpenAI's API: chat and text completions, /v1/models, /health, /metrics."
EPILOG = """Example:
  sage-serve --draft runs/demo_pocket_qwen2_5_vl --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

A first SIGTERM or Ctrl-C lets answers in progress finish, a second one ends the process. docs/serving.md describes the API."""
PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra `serve`
KEY_VARIABLE = "SAGE_API_KEY"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = cli.new_parser("sage-serve", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("--config", metavar="FILE", help="file with options as on the command line, which overrides them; # begins a comment")
    cli.add_model_options(parser)
    add("--policy", help=f"one of {', '.join(POLICIES)} (default: {DEFAULT_POLICY}, without a draft {AUTOREGRESSIVE})")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="port (default: %(default)s; 0: a free one)")
    add("--model-name", metavar="NAME", help="name of the target in the API (default: its folder or hub id)")
    text = f"key that clients must send (default: the variable {KEY_VARIABLE}, if set)"
    add("--api-key", metavar="KEY", type=_key, default=os.environ.get(KEY_VARIABLE, ""), help=text)
    text = "hosts that images may be downloaded from, separated by commas (default: none; clients send images as data URLs)"
    add("--allow-remote-media", metavar="HOST,..", type=_hosts, default=(), help=text)
    text = "origins of web pages that may use the server, separated by commas, or * (default: none)"
    add("--allowed-origins", metavar="ORIGIN,..", type=lambda text: text.split(","), default=(), help=text)
    add("--ignore-unknown-fields", action="store_true", help="ignore unknown fields of requests, which are refused otherwise")
    add("--log-level", choices=LEVELS, default="info", help="what is logged on stderr; info: every request (default: info)")
    cli.add_settings(parser, ServerLimits)
    cli.add_load_options(parser, cli.FAST_DTYPE)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args([*_options_of(parser, argv), *argv])
    args.policy = args.policy or (DEFAULT_POLICY if args.draft else AUTOREGRESSIVE)
    return args


def _options_of(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Returns the options in the file of `--config`."""
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("--config", nargs="?")  # without a value: an error of the other parser
    file = only.parse_known_args(argv)[0].config
    try:
        return [] if file is None else shlex.split(Path(file).read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as error:
        parser.error(f"--config {file}: {error}")


def _key(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError("has a line break, a blank or another character that no key has")
    return text


def _hosts(text: str) -> list[str]:
    hosts = [host.strip().lower() for host in text.split(",")]
    for host in hosts:
        if not host or not host.isascii() or set(host) & set("/:@*?# "):
            raise argparse.ArgumentTypeError(f"{host!r} is not a host; give names such as images.example.com")
    return hosts


def main() -> None:
    """Console entry point."""
    sys.exit(cli.run(lambda: _serve(*check(parse_args()))))


def check(args: argparse.Namespace) -> tuple[argparse.Namespace, ServerLimits]:
    """Refuses mistakes of the command line, by ValueError, before anything is loaded; imports no torch."""
    limits = from_attributes(ServerLimits, args)
    check_name(args.policy)
    if args.policy != AUTOREGRESSIVE and not args.draft:
        message = f"--draft: missing, and the policy {args.policy!r} needs one"
        raise ValueError(f"{message}; give a draft folder or --policy {AUTOREGRESSIVE}")
    cli.named_models(args)
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"sage-serve: {', '.join(missing)} not installed; pip install 'sage-draft[serve]'")
    return args, limits


def _serve(args: argparse.Namespace, limits: ServerLimits) -> int:
    """Serves until a signal; returns the exit code."""
    from sage.runtime.timing import frozen_heap
    from sage.serving.decoder_process import start_logging
    from sage.serving.server import Server, address_of, bind
    from sage.serving.service import load_service

    start_logging(args.log_level)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the server listens
    with bind(args.host, args.port) as bound:
        is_local = ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback
        service = load_service(args, limits, is_local)
        try:
            if not (service.access.api_key or service.access.is_local):
                note = f"everyone who reaches it can use the server; give --api-key or set {KEY_VARIABLE}"
                print(f"warning: --host {args.host}: {note}", file=sys.stderr)
            line = f"sage-serve: {address_of(bound)}/v1 serves {service.model}: up to {limits.max_requests} requests"
            line += f" of {service.max_context} tokens each, policy {args.policy}"
            with frozen_heap():
                Server(service, lambda: print(line, flush=True)).run(sockets=[bound])
        finally:
            service.close()
        return cli.EXIT_CRASH if service.scheduler.has_failed else cli.EXIT_DONE
