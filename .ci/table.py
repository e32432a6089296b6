"""Print one table of a run of pytest: for each test function its cases, failures and seconds. Usage: table.py FILE."""

import sys
from collections import defaultdict
from xml.etree import ElementTree

rows: dict[str, list[tuple[str, float]]] = defaultdict(list)
for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    found = [end for end in ("failure", "error", "skipped") if case.find(end) is not None]
    name = f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name', '').partition('[')[0]}"
    rows[name].append((found[0] if found else "passed", float(case.get("time", 0))))
width = max([len("test"), *map(len, rows)])
print(f"{'test':{width}}  cases  passed  failed  skipped  seconds  longest")
for name, cases in sorted(rows.items()):
    ends, times_s = [end for end, _ in cases], [time_s for _, time_s in cases]
    failed = ends.count("failure") + ends.count("error")
    counts = f"{len(cases):5}  {ends.count('passed'):6}  {failed:6}  {ends.count('skipped'):7}"
    print(f"{name:{width}}  {counts}  {sum(times_s):7.0f}  {max(times_s):7.1f}")
