"""The columns at the end of a trace file say what its events say, as long as those are what was written."""

import json

import pytest
from hypothesis import given

from overlap.timeline import read_trace, write_trace
from overlap.timeline.files.parts import read_end
from overlap.timeline.spans import Timeline

from .made import comm, compute, traces


def without_end(data):
    return data[: data.rindex(b',"columns":')] + b"}\n"


@given(traces())
def test_the_end_says_what_the_events_say(tmp_path_factory, timeline):
    path = tmp_path_factory.mktemp("t") / "t.json"
    write_trace(timeline, path)
    data = path.read_bytes()
    beginning, columns = read_end([data])
    assert beginning.startswith(b'{"displayTimeUnit"')
    assert sorted(columns.spans(), key=str) == sorted(timeline.spans, key=str)
    assert read_trace(path) == timeline
    path.write_bytes(without_end(data))
    assert read_end([path.read_bytes()]) is None
    assert read_trace(path) == timeline


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "t.json"
    write_trace(Timeline(spans=[compute(0, 0, 5), comm(0, 5, 6, 9)], world_size=1), path)
    return path


def test_who_changes_an_event_sees_the_change(written):
    written.write_text(written.read_text().replace('"name":"work"', '"name":"play"'))
    assert [span.name for span in read_trace(written).spans] == ["play", "all_reduce"]


def test_who_writes_it_anew_sees_what_is_left(written):
    document = json.loads(written.read_text())
    document["traceEvents"] = [each for each in document["traceEvents"] if each["name"] != "work"]
    written.write_text(json.dumps(document))
    assert [span.name for span in read_trace(written).spans] == ["all_reduce"]


@pytest.mark.parametrize(
    ("old", "new"), [('"version":3}}', '"version":4}}'), ('"ranks":[\n[0,"', '"ranks":[\n[0,"!'), ('[0,"', '["",0,"')]
)
def test_of_an_end_that_says_nothing_the_events_count(written, old, new):
    text, spans = written.read_text(), read_trace(written).spans
    assert text.count(old) == 1
    written.write_text(text.replace(old, new))
    assert read_end([written.read_bytes()]) is None
    assert read_trace(written).spans == list(spans)
