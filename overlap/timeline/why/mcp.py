"""A server of the Model Context Protocol with one tool, `why`: requests of JSON-RPC, one on each line of a stream.

Methods and fields: modelcontextprotocol.io, specification of 2025-06-18, "stdio" and "tools".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import IO, Any

from ...errors import UsageError
from ...version import version

PROTOCOL = "2025-06-18"
_NO_METHOD, _NO_JSON = -32601, -32700
_TOOL = {
    "name": "why",
    "description": "Say why a PyTorch job is slow or stuck, on which line, and what to change, from traces of its "
    "profiler or dumps of its flight recorder: a report as JSON, whose times are nanoseconds.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "a trace or a dump, or a folder with those of one job"},
            "step": {"type": "integer", "description": "step to show; the median one by default"},
        },
        "required": ["path"],
    },
}


def serve(requests: IO[str], answers: IO[str], why: Callable[..., Any]) -> None:
    """Answer requests until their stream ends; `why` takes a path and a step, and returns a report."""
    for line in requests:
        try:
            request = json.loads(line)
        except ValueError as error:
            request, answer = {"id": None}, {"error": {"code": _NO_JSON, "message": str(error)}}
        else:
            if not isinstance(request, dict) or "id" not in request:  # a notification
                continue
            answer = _answer_request(request, why)
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), file=answers, flush=True)


def _answer_request(request: Mapping[str, Any], why: Callable[..., Any]) -> dict[str, Any]:
    """Return the result or the error of one request, as JSON-RPC fields; `why` is called for "tools/call"."""
    method, params = request.get("method"), _as_mapping(request.get("params"))
    if method == "initialize":
        about = {"name": "overlap", "version": version()}
        return {"result": {"protocolVersion": PROTOCOL, "capabilities": {"tools": {}}, "serverInfo": about}}
    if method == "ping":
        return {"result": {}}
    if method == "tools/list":
        return {"result": {"tools": [_TOOL]}}
    if method != "tools/call" or params.get("name") != "why":
        return {"error": {"code": _NO_METHOD, "message": f"no method or tool {params.get('name', method)!r}"}}
    given = _as_mapping(params.get("arguments"))
    try:
        text, failed = json.dumps(why(str(given.get("path", "")), step=given.get("step")).as_dict()), False
    except UsageError as error:
        text, failed = str(error), True
    return {"result": {"content": [{"type": "text", "text": text}], "isError": failed}}


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
