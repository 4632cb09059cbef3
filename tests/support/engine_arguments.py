"""A program of an engine's environment: what its own parser says of command lines of its server.

["vllm" or "sglang", [[word after the program's name, ...], ...]] -> ["" or the parser's last words, ...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from importlib.metadata import entry_points


def vllm_parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).make_arg_parser(FlexibleArgumentParser())
    raise ImportError("make_arg_parser of vLLM's server")


def sglang_parser() -> argparse.ArgumentParser:
    for found in entry_points(group="sglang.srt.plugins"):
        found.load()()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def said_of(parser: argparse.ArgumentParser, words: list[str]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser.parse_args(words)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    return ""


if __name__ == "__main__":
    engine, lines = json.load(sys.stdin)
    made = vllm_parser() if engine == "vllm" else sglang_parser()
    print("RESULT " + json.dumps([said_of(made, words) for words in lines]))
