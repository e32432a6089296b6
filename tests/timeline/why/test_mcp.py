"""The server for agents: one request and one answer a line."""

import io
import json
import subprocess
import sys

import overlap
from overlap.timeline.why.mcp import serve
from tests.timeline.why.profiles import Recording


def answers(*requests):
    lines = [each if isinstance(each, str) else json.dumps({"jsonrpc": "2.0", **each}) for each in requests]
    found = io.StringIO()
    serve(io.StringIO("\n".join(lines) + "\n"), found, overlap.why)
    return [json.loads(line) for line in found.getvalue().splitlines()]


def call(path, **more):
    return {"id": 7, "method": "tools/call", "params": {"name": "why", "arguments": {"path": str(path), **more}}}


def test_an_agent_finds_the_tool():
    started, listed = answers(
        {"id": 1, "method": "initialize", "params": {}},
        {"method": "notifications/initialized"},
        {"id": "a", "method": "tools/list"},
    )
    assert started["result"]["capabilities"] == {"tools": {}}
    assert (listed["id"], [tool["name"] for tool in listed["result"]["tools"]]) == ("a", ["why"])


def test_the_tool_returns_the_report(tmp_path):
    rec = Recording()
    rec.kernel(0, 1_000, launch=-5)
    path = rec.write(tmp_path / "t.json")
    (answer,) = answers(call(path))
    (content,) = answer["result"]["content"]
    assert json.loads(content["text"]) == json.loads(json.dumps(overlap.why(path).as_dict()))
    assert not answer["result"]["isError"]


def test_errors_are_answers(tmp_path):
    missing, method, damaged = answers(call(tmp_path / "none.json"), {"id": 2, "method": "x", "params": [1]}, "{")
    assert missing["result"]["isError"]
    assert "no such file" in missing["result"]["content"][0]["text"]
    assert (method["id"], method["error"]["code"], damaged["error"]["code"]) == (2, -32601, -32700)


def test_the_command_serves():
    command = [sys.executable, "-m", "overlap", "why", "--mcp"]
    asked = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}) + "\n"
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"jsonrpc": "2.0", "id": 1, "result": {}}
