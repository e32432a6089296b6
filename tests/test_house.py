"""The house is as its plan says: who may import whom, what is public, what is documented, what is shipped."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from transports.base import PAYLOAD_BYTES

ROOT = Path(__file__).parents[1]
HOUSES = ("overlap", "topology", "transports")

# From the cellar up. A module imports from its own room and from lower floors; two rooms of one floor do not meet.
# Type checkers' imports count, for they are dependencies of the design; but not those inside `overlap.runtime` and
# inside `transports`, whose parts call each other and their owners back: a protocol with one implementation would say
# no more; nor those of the door of `overlap.timeline`, which loads pictures when they are used.
HOUSE = (
    ("topology", "transports"),
    ("overlap.ranklist",),
    ("overlap.errors",),
    ("overlap.threads", "overlap.tasks", "overlap.kernel_facts", "overlap.defaults"),
    ("overlap.units", "overlap.notice", "overlap.version", "overlap.diagnostics", "overlap.hints"),
    ("overlap.collectives", "overlap.data"),
    ("overlap.cost",),
    ("overlap.waits",),
    ("overlap.timeline", "overlap.trace_files"),
    ("overlap.flight",),
    ("overlap.explain",),
    ("overlap.timeline.draw",),  # pictures end with the sentence that `explain` says
    # one process's ranks
    ("overlap.runtime.state", "overlap.runtime.failure", "overlap.runtime.not_a_value"),
    ("overlap.runtime.trio_private",),
    ("overlap.runtime.interrupts",),
    ("overlap.runtime.settling",),
    ("overlap.runtime.callbacks",),
    ("overlap.runtime.future", "overlap.runtime.memory", "overlap.runtime.interpreter"),
    ("overlap.runtime.derived",),
    ("overlap.runtime.outstanding", "overlap.runtime.ending", "overlap.runtime.event_loop", "overlap.runtime.handover"),
    ("overlap.runtime.forks",),
    ("overlap.runtime.blame.loop",),
    ("overlap.runtime.context",),
    ("overlap.runtime.forms",),
    ("overlap.runtime.signature_text",),
    ("overlap.runtime.signature", "overlap.runtime.engine.host_bytes", "overlap.runtime.engine.polling"),
    ("overlap.runtime.operation", "overlap.runtime.trees"),
    ("overlap.runtime.match", "overlap.runtime.tree_operation"),
    ("overlap.runtime.transfer",),
    ("overlap.runtime.arguments",),
    ("overlap.runtime.task", "overlap.runtime.stream"),
    ("overlap.runtime.compute",),
    ("overlap.runtime.daemons",),
    ("overlap.runtime.lane",),
    ("overlap.runtime.message",),
    ("overlap.runtime.inbox",),
    ("overlap.runtime.plan", "overlap.runtime.interceptor"),
    ("overlap.runtime.communicator",),
    ("overlap.runtime.communicators",),
    ("overlap.runtime.engine",),
    ("overlap.runtime.backend",),
    ("overlap.runtime.known_message",),
    ("overlap.runtime.messages", "overlap.runtime.port"),
    ("overlap.runtime.objects", "overlap.runtime.checking"),
    ("overlap.runtime.calls",),
    ("overlap.runtime.group",),
    ("overlap.state", "overlap.runtime.epoch"),
    ("overlap.runtime.rank",),
    ("overlap.runtime.blame",),
    ("overlap.runtime.world",),
    ("overlap.runtime",),
    # simulated time, and other processes
    ("overlap.simulation",),
    ("overlap.settings",),
    ("overlap.config",),
    ("overlap.processes", "overlap.signals"),
    ("overlap.survival",),
    ("overlap.launch",),
    # the doors
    ("overlap.uncaught",),
    ("overlap.embedded",),  # connect()
    ("overlap.front",),  # what `import overlap` gives, and run()
    # what is built on it
    ("overlap.parallel.schedules",),
    ("overlap.parallel",),
    ("overlap.torch", "overlap.ray"),
    ("overlap.testing",),
    ("overlap.cli",),
    ("overlap.__main__",),
)
FLOORS = {room: floor for floor, rooms in enumerate(HOUSE) for room in rooms}
# Rooms without any waiting, and what they must therefore not know.
PURE = (
    "topology",
    "overlap.errors",
    "overlap.units",
    "overlap.ranklist",
    "overlap.collectives",
    "overlap.timeline",
    "overlap.timeline.draw",
    "overlap.waits",
    "overlap.parallel.schedules",
)
WAITING = ("trio", "asyncio", "socket", "transports")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for house in HOUSES for path in sorted((ROOT / house).rglob("*.py"))}
PACKAGES = sorted(name for name, path in FILES.items() if path.name == "__init__.py")


@cache
def room_of(name: str) -> str:
    """The innermost room that a module belongs to."""
    if name == "overlap":
        return "overlap.front"
    rooms = [room for room in FLOORS if name == room or name.startswith(room + ".")]
    assert rooms, f"{name} stands on no floor of HOUSE"
    return max(rooms, key=len)


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@cache
def nodes(name: str) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
    """Return the imports and classes of a file, for all tests."""
    return [node for node in statements(tree(name)) if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through what is within a node but expressions, which are most of a file, for seconds in all files."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


@cache
def imports(name: str) -> tuple[tuple[int, str], ...]:
    """Every import of a module, wherever it stands, as (line, module)."""
    return tuple(found_imports(name))


def found_imports(name: str) -> Iterator[tuple[int, str]]:
    is_free = name.startswith(("overlap.runtime.", "transports.")) or name == "overlap.timeline"
    of_types = set(lines_of_types(name)) if is_free else set[int]()
    for line, target in all_imports(name):
        if line not in of_types or target.split(".")[0] != name.split(".")[0]:
            yield line, target


def lines_of_types(name: str) -> Iterator[int]:
    """The lines of a module that only type checkers read."""
    for node in tree(name).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def all_imports(name: str) -> Iterator[tuple[int, str]]:
    package = name.split(".") if name in PACKAGES else name.split(".")[:-1]
    for node in nodes(name):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in FILES else base


@pytest.mark.slow
def test_imports_only_point_down_the_house() -> None:
    """One test of all files, as in the other tests of each: of a thousand, pytest's own work would be most of it."""
    up, waiting = [], []
    for name in FILES:
        room = room_of(name)
        for line, target in imports(name):
            house = target.split(".")[0]
            if house in HOUSES and (other := room_of(target)) != room and FLOORS[other] >= FLOORS[room]:
                up.append(f"{name}:{line} imports {target}")
            if room in PURE and house in WAITING:
                waiting.append(f"{name}:{line} imports {target}, but {room} is pure")
    assert (up, waiting) == ([], [])


def test_files_do_not_import_round_and_round() -> None:
    graph = {name: {target for _, target in imports(name) if target in FILES} - {name} for name in FILES}
    assert all(graph[name] for name in ("overlap.runtime.world", "transports.router", "topology.cluster"))
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_the_plan_names_rooms_that_stand() -> None:
    assert set(FLOORS) - {room_of(name) for name in FILES} == set()


def test_the_rule_sees_what_it_should() -> None:
    """The resolver above, tried where the answer is known."""
    assert room_of("overlap.collectives.generators.ring") == "overlap.collectives"
    assert room_of("overlap.runtime.engine.execution") == "overlap.runtime.engine"
    assert (room_of("overlap.runtime.world"), room_of("overlap")) == ("overlap.runtime.world", "overlap.front")
    assert "overlap.runtime.port" not in {target for _, target in imports("overlap.runtime.interceptor")}
    assert "overlap.runtime.port" in {target for _, target in all_imports("overlap.runtime.interceptor")}
    targets = {target for _, target in imports("overlap.runtime.world")}
    assert {"topology", "transports", "trio", "overlap.runtime.backend", "overlap.errors"} <= targets
    assert "overlap.errors" in {target for _, target in imports("overlap.collectives.kinds")}


def test_every_file_says_what_it_is_for() -> None:
    assert [name for name in FILES if not ast.get_docstring(tree(name))] == []


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


EXPORTING = [name for name in PACKAGES if "__all__" in FILES[name].read_text(encoding="utf-8")]
# What strangers import from; in other rooms an __init__ may hold code of its own, with names it needs for that.
FRONTS = [*HOUSES, "overlap.collectives", "overlap.timeline", "overlap.parallel.schedules"]


# Rooms that need more than the package does: the module that it is, and why the test is skipped without.
EXTRAS = {"overlap.torch": ("torch", "torch is not installed"), "overlap.ray": ("ray", "not installed: ray")}


@pytest.mark.parametrize("name", ["overlap.dask", "overlap.engines"])
def test_packages_that_went_are_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
        load(name)


@pytest.mark.everyday(30)
@pytest.mark.parametrize("name", EXPORTING)
def test_what_all_promises_is_there(name: str) -> None:
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name][0], reason=EXTRAS[name][1])
    package = load(name)
    assert len(set(package.__all__)) == len(package.__all__)
    assert [missing for missing in package.__all__ if not hasattr(package, missing)] == []


@pytest.mark.everyday(30)
@pytest.mark.parametrize("name", FRONTS)
def test_exports_match_all(name: str) -> None:
    package = load(name)
    ours = {
        key
        for key, value in vars(package).items()
        if not key.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
        if value.__module__.split(".")[0] in HOUSES
    }
    assert ours - set(package.__all__) == set()


@pytest.mark.everyday(30)
@pytest.mark.parametrize("name", FRONTS)
def test_no_export_is_shadowed_by_a_file_of_its_name(name: str) -> None:
    """Importing a file makes it an attribute of its package; an export loaded when used would lose to it."""
    package = load(name)
    for module in FILES:
        if module.rpartition(".")[0] == name and module.rpartition(".")[2] in package.__all__:
            load(module)
    assert [key for key in package.__all__ if inspect.ismodule(getattr(package, key))] == []


def public_objects() -> Iterator[tuple[str, object]]:
    """Everything exported, and every public method and property of the classes among it."""
    for name in [*FRONTS, "transports.testing"]:
        package = load(name)
        for key in getattr(package, "__all__", [key for key in vars(package) if key.startswith("check")]):
            value = getattr(package, key)
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{name}.{key}", value
            if inspect.isclass(value):
                yield from ((f"{name}.{key}.{method}", found) for method, found in methods(value))


def methods(kind: type) -> Iterator[tuple[str, object]]:
    for name, value in inspect.getmembers_static(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
        if name.startswith("_") or owner.__module__.split(".")[0] not in HOUSES:
            continue
        value = getattr(value, "__func__", value)  # of static and class methods
        if inspect.isfunction(value) or isinstance(value, property):
            yield name, value


def test_public_names_are_documented() -> None:
    found = dict(public_objects())
    assert {"overlap.Rank.all_reduce", "overlap.Future.done", "transports.Wire.send"} <= set(found)
    assert [name for name, value in found.items() if not inspect.getdoc(value)] == []


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class of the houses, with the name of its module."""
    for name in FILES:
        yield from ((name, node) for node in nodes(name) if isinstance(node, ast.ClassDef))


def own_attributes(kind: ast.ClassDef) -> Iterator[tuple[ast.expr, ast.expr | None, ast.FunctionDef | None]]:
    """Yield targets that a class assigns to, with the value if it is assigned plainly, and the method around it."""
    for method in (node for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for node in ast.walk(method):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    parts = target.elts if isinstance(target, ast.Tuple) else [target]
                    yield from ((part, node.value if part is target else None, method) for part in parts)


def declared(kind: ast.ClassDef) -> set[str]:
    """Return the names that a class annotates, and its methods and properties."""
    named = {node.name for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(kind):
        if isinstance(node, ast.AnnAssign):
            named.add(node.target.id if isinstance(node.target, ast.Name) else getattr(node.target, "attr", ""))
    return named


def test_the_tree_of_errors_has_every_error() -> None:
    """Those of `overlap.errors`, and of others only errors that are there."""
    errors = (ROOT / "overlap" / "errors.py").read_text()
    drawn = set(re.findall(r"\w+(?:Error|Warning)\b", errors.split('"""')[1]))
    here = set(_ERRORS.findall(errors))
    pages = (ROOT / "overlap" / "processes").glob("*.py")
    assert here <= drawn <= here.union(*(_ERRORS.findall(page.read_text()) for page in pages))


_ERRORS = re.compile(r"^class (\w+(?:Error|Warning))\b", re.MULTILINE)


def test_arguments_of_a_constructor_stand_in_the_docstring_of_its_class() -> None:
    silent = []
    for path in FILES.values():
        classes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ClassDef)]
        for cls in classes:
            text = ast.get_docstring(cls) or ""
            for init in (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
                names = [argument.arg for argument in (*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs)]
                missing = [name for name in names[1:] if not re.search(rf"\b{name}\b", text)]
                if "Args:" in (ast.get_docstring(init) or ""):
                    silent.append(f"{cls.name}: its constructor has the arguments")
                elif len(names) > 3 and missing and "Arguments are those" not in text and "Arguments as" not in text:
                    silent.append(f"{path.relative_to(ROOT)}: {cls.name}: {', '.join(missing)}")
    assert silent == []


@pytest.mark.slow
def test_public_attributes_have_a_declared_type() -> None:
    """Few have none, of which type checkers may infer different types; mypy asks for all other annotations.

    `.ci/run types` measures the share of all public names whose types are known; this keeps it above 99 %.
    """
    known: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for _, kind in classes():
        known.setdefault(kind.name, set()).update(declared(kind))
        bases.setdefault(kind.name, set()).update(re.findall(r"\w+", " ".join(map(ast.unparse, kind.bases))))

    def found(name: str) -> set[str]:
        above = (found(base) for base in bases.get(name, set()) if base != name)
        return known.get(name, set()).union(*above)

    missing, all_of_them = set(), set()
    for module, kind in classes():
        for target, value, method in own_attributes(kind):
            if (
                kind.name.startswith("_")
                or not isinstance(target, ast.Attribute)
                or ast.unparse(target.value) != "self"
            ):
                continue
            given = {each.arg for each in ast.walk(method.args) if isinstance(each, ast.arg)}
            plain = isinstance(value, ast.Name) and value.id in given
            if not target.attr.startswith("_") and not plain and target.attr not in found(kind.name):
                missing.add(f"{module}.{kind.name}.{target.attr}")
            all_of_them.add((module, kind.name, ast.unparse(target)))
    assert len(missing) < 0.02 * len(all_of_them), f"declare types of {sorted(missing)}"


def test_collectives_show_before_and_after() -> None:
    names = "all_reduce reduce_scatter all_gather all_to_all broadcast reduce gather scatter permute"
    docs = {name: inspect.getdoc(getattr(load("overlap").Group, name)) or "" for name in names.split()}
    assert [name for name, doc in docs.items() if "before      after" not in doc] == []


def modules_after(statement: str, *, whole: bool = False) -> set[str]:
    """Run a statement in a fresh interpreter; return the modules that it has loaded, or only the top level of them."""
    code = (
        f"import sys; {statement}; print(*{{{'name' if whole else 'name.split(chr(46))[0]'} for name in sys.modules}})"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(ran.stdout.split())


def test_importing_overlap_loads_nothing_that_is_used_by_few() -> None:
    loaded = modules_after("import overlap")
    assert {"overlap", "trio", "numpy"} <= loaded
    assert loaded & {"rich", "msgpack", "msgspec", "threadpoolctl", "ml_dtypes", "mpi4py"} == set()


@pytest.mark.slow
def test_strategies_load_no_test_tools() -> None:
    """Where pytest is installed, `trio.testing` imports it, which takes longer than all of Trio."""
    assert modules_after("import overlap.parallel") & {"pytest", "_pytest"} == set()


def test_a_command_that_only_reads_files_loads_no_runtime_before_it_is_used() -> None:
    statement = "sys.argv = ['bin/overlap', 'why']; import overlap, overlap.cli.why"
    assert modules_after(statement) & {"trio", "transports", "torch", "rich"} == set()
    assert "overlap.runtime.rank" not in modules_after(statement, whole=True)
    assert "overlap.front" in modules_after(f"{statement}; overlap.run", whole=True)


@pytest.mark.slow
def test_the_backend_of_torch_loads_no_strategies() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    assert modules_after("import overlap.torch", whole=True) & {"overlap.parallel", "overlap.simulation"} == set()


def test_a_node_loads_nothing_that_is_used_by_few() -> None:
    """Every process of a job, and its launcher, would take as long again to start."""
    loaded = modules_after("import overlap.cli.run", whole=True)
    few = (
        "overlap.launch.restarts",
        "overlap.flight.ends",
        "overlap.parallel",
        "overlap.simulation",
        "pytest",
        "topology",
        "trio.testing",
    )
    assert {"overlap.front", "overlap.cli.processes"} <= loaded
    assert sorted(name for name in loaded if name.startswith(few)) == []


def test_the_version_is_the_projects_also_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = load("overlap")
    assert overlap.__version__ == SETTINGS["project"]["version"]
    version = load("overlap.version")
    monkeypatch.setattr(version, "installed", absent)
    assert overlap.__version__ == SETTINGS["project"]["version"]


def absent(name: str) -> str:
    raise PackageNotFoundError(name)


def test_listing_overlap_shows_what_is_public() -> None:
    overlap = load("overlap")
    assert dir(overlap) == sorted([*overlap.__all__, "__version__"])
    assert {"Virtual", "Conditions", "Interference"} <= set(dir(overlap))


def test_no_page_or_message_installs_the_package_of_that_name_from_the_index() -> None:
    """The index has an unrelated `overlap`: the install commands name a checkout."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py"), *FILES.values()]
    line = re.compile(r"pip install [^\n&`)]*\boverlap\b")
    assert [path.name for path in pages if "overlap[" in path.read_text("utf-8")] == []
    assert [path.name for path in pages if line.search(path.read_text("utf-8"))] == []


# Names of things that went, as pages, messages and help would write them. CHANGELOG.md and the tables of `overlap/cli`
# name them for one more version: what to do instead.
WENT = (
    r"overlap (model|calibrate|replay)\b",
    r"\b[Ww]hat-if\b|--(advise|html|svg|mcp|markdown|mtbf|sweep|slow-\w+|straggler-\w+|best|give-up|against)\b|--stall\b(?!-)",
    r"overlap run[^\n`]*--nproc-per-node",  # of torchrun it is an option
    r"\beach_call\b|\bgoodput\b|\breplicate=|\border=|bucket_bytes=.auto|Sharded\(replicate",
    r"overlap[./](planning|engines)\b|\b[Pp]lanner\b|\bdask\b",  # Dask itself has a capital
    r"--spares\b|OVERLAP_SPARES|\bpresent_world\b|\bepoch\.joined\b|demo --survive|test\b[^\n`]*--operations\b",
    r"--unannounced\b|--(no-)?unix\b|simulate[^\n`]*--profile\b",
    r"runtime/forcing\b|`forcing`",
    r"--transport mpi\b|(?<!examples/)transports[./]mpi\b|\bMpi\b|\[mpi\]",
    r"parallel\.(Experts|LocalSGD|LocalSteps|DiLoCo)\b|(?<!Post)LocalSGD|\bLocalSteps\b",  # PyTorch has PostLocalSGD
    r"overlap\.torch(\.| import .*)(DataParallel|Sharded|Model)\b",
    r"\b(u-)?(p4de?|p5e?n?|p6e?|mi300x)\b",  # machines with GPUs
    r"library = .(nccl|rccl)\b|libraries/(nccl|rccl)\b",
)


def readings() -> Iterator[tuple[str, str]]:
    """Yield what users read, with its place: pages, examples and machine files line by line, texts of the product.

    Sources that machine files cite are left out: a page about other machines may have measured a wire that ours share.
    """
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]
    folders = {"docs": "*.md", "examples": "*.*", "topology": "*.toml", "overlap": "*.toml"}
    pages += [path for folder, name in folders.items() for path in sorted((ROOT / folder).rglob(name))]
    for page in pages:
        if "__pycache__" not in page.parts:
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
                yield f"{page.relative_to(ROOT)}:{number}", re.sub(r'source = "[^"]*"', "", line)
    for name, path in FILES.items():
        if _WENT.search(path.read_text(encoding="utf-8")):  # few do: to walk through all takes seconds
            texts = [node for node in ast.walk(tree(name)) if isinstance(node, ast.Constant)]
            yield from ((name, node.value) for node in texts if isinstance(node.value, str))


_WENT = re.compile("|".join(WENT))


def test_nothing_that_users_read_names_what_went() -> None:
    named = [(place, found[0]) for place, text in readings() if (found := _WENT.search(text))]
    assert named == [("topology.tables", "planner")]  # the error for a key that only the planner read


def test_topology_stands_alone() -> None:
    assert modules_after("import topology") & {"trio", "overlap", "transports", "msgspec", "tomllib"} == set()


def test_what_control_links_ask_of_the_kernel_is_loaded_with_them() -> None:
    """An import keeps the event loop, and all sockets between ranks would take 30 ms."""
    loaded = modules_after("import overlap.processes.link", whole=True)
    assert "transports.tcp" in loaded
    assert "transports.efa" not in loaded


def test_transports_stand_without_overlap() -> None:
    assert modules_after("import transports, transports.testing") & {"overlap", "topology", "rich"} == set()


SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_wheel_has_exactly_the_three_packages_and_all_of_their_folders() -> None:
    setuptools = SETTINGS["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"": "."}
    assert {name.split(".")[0] for name in setuptools["packages"]} == set(HOUSES)
    assert sorted(setuptools["packages"]) == PACKAGES


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in FILES.values()}
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []


def test_what_is_not_code_is_shipped_too() -> None:
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]
    for house in HOUSES:
        assert (ROOT / house / "py.typed").is_file()
        for path in (ROOT / house).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc", ".so"):  # what is compiled is made anew
                assert shipped(path, patterns), path.relative_to(ROOT)


def shipped(path: Path, patterns: dict[str, list[str]]) -> bool:
    """Whether a pattern of the package above a file, or of all packages, matches it."""
    for folder in path.relative_to(ROOT).parents:
        name = ".".join(folder.parts)
        inside = path.relative_to(ROOT / folder).as_posix()
        allowed = patterns.get("*", []) + patterns.get(name, []) if name in PACKAGES else []
        if any(fnmatch(inside, pattern) for pattern in allowed):
            return True
    return False


def test_an_sdist_has_all_that_its_tests_read() -> None:
    """Everything at the top of the repository is a package, or is told to setuptools."""
    told = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").split()
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    shipped = {*told, *HOUSES, "MANIFEST.in", "README.md", "pyproject.toml", "pytest_overlap.py"}
    found = [path.name + "/" * path.is_dir() for path in ROOT.iterdir()]
    of_tools = {".git", ".git/", *ignored, "PKG-INFO", "setup.cfg"}
    kept = [name for name in found if not any(fnmatch(name, pattern) for pattern in of_tools)]
    assert [name for name in kept if name.rstrip("/") not in shipped] == []


def test_the_payload_of_a_row_is_as_long_in_the_compiled_collectives_as_in_their_prices() -> None:
    """The compiled code cannot import it, and a price with another limit would be of another way."""
    native = ROOT / "transports/shared_memory/native/collectives.c"
    found = re.findall(r"^#define PAYLOAD_BYTES +(\d+)", native.read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [str(PAYLOAD_BYTES)]


def test_the_extras_that_the_checks_install_exist() -> None:
    """pip only warns of an extra that it does not find, and then tests skip."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [
        extra
        for path in (ROOT / ".ci").iterdir()
        for names in re.findall(r"install .*\.\[([a-z,-]+)\]", path.read_text())
        for extra in names.split(",")
    ]
    assert {"test", "ray"} <= set(named) <= set(known)


def test_the_tests_that_the_checks_name_exist() -> None:
    """A part that runs only when it is named would fail months after its tests had moved."""
    from tests.transports import mailbox_builds

    named = list(mailbox_builds.FILES)
    for script in ("run", "torch"):
        for path in re.findall(r"tests/[\w/{},*.]+", (ROOT / ".ci" / script).read_text()):
            head, _, rest = path.partition("{")
            choices, _, tail = rest.partition("}")
            named += [f"{head}{each}{tail}" for each in choices.split(",")]
    assert len(named) > 8
    assert [path for path in named if not list(ROOT.glob(path))] == []
