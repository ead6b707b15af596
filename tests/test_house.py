"""The house rules that a machine can hold: imports, names, errors, events, messages."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import builtin_plugins
import hookbus
from hookbus import errors, hookspecs
from hookbus.registration import EVENTS

ROOT = Path(hookbus.__file__).parents[1]
PRODUCT = sorted([*ROOT.glob("hookbus/**/*.py"), *ROOT.glob("builtin_plugins/**/*.py")])
IDS = [str(path.relative_to(ROOT)) for path in PRODUCT]


def read_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def list_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports, without those for type checkers alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else str(node.module)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def name_module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# -- imports ------------------------------------------------------------------------------------


def test_imports_go_round_in_no_circle() -> None:
    graph = {name_module(path): set(list_imports(read_tree(path))) for path in PRODUCT}
    list(TopologicalSorter(graph).static_order())  # raises for a circle, and names it


@pytest.mark.parametrize("path", PRODUCT, ids=IDS)
def test_imports_point_one_way(path: Path) -> None:
    module, imported = name_module(path), set(list_imports(read_tree(path)))
    ours = {name for name in imported if name.split(".")[0] in ("hookbus", "builtin_plugins")}
    if module.startswith("builtin_plugins"):
        inside = {name for name in ours if name.startswith("builtin_plugins")}
        foreign = {(str(path.relative_to(ROOT)), name) for name in ours - inside}
        public = {"hookbus", "hookbus.errors", "hookbus.logs"}
        assert not [pair for pair in foreign if pair[1] not in public]
        return
    assert not any(name.startswith("builtin_plugins") for name in ours)
    may_import_bus = ("hookbus", "hookbus.testing", "hookbus.cli", "hookbus.__main__")
    may_too = ("hookbus.cli.", "hookbus.testing.")
    if module not in may_import_bus and not module.startswith(may_too):
        assert not ours & {"hookbus", "hookbus.bus", "hookbus.testing", "hookbus.cli"}
    if module == "hookbus.errors":
        assert not ours
    if module.startswith("hookbus.checkpoint"):
        assert {n for n in ours if not n.startswith("hookbus.checkpoint")} <= {"hookbus.errors"}
    if module.startswith("hookbus.cli"):
        rooms = ("hookbus.checkpoint", "hookbus.cli", "hookbus.errors", "hookbus.logs")
        about_plugins = {
            "hookbus.cli.plugins": {"hookbus.bus", "hookbus.registration"},
            "hookbus.cli.new_plugin": {"hookbus.entry_points", "hookbus.ordering"},
        }
        others = {name for name in ours if not name.startswith(rooms)}
        assert others <= about_plugins.get(module, set())
    if module in ("hookbus.hookspecs", "hookbus.sequence", "hookbus.report"):
        assert ours <= {"hookbus.errors"}
    if module == "hookbus.request":
        assert ours <= {"hookbus.checkpoint", "hookbus.errors"}
    if module in ("hookbus.resume", "hookbus.save", "hookbus.registration", "hookbus.ordering"):
        assert not ours & {"hookbus.plugins", "hookbus.relay", "hookbus.resuming", "hookbus.saver"}


WITH_TORCH = {"tensors", "torch_kinds", "leaves", "tree", "loading", "placing"}
WITH_TORCH |= {"in_memory", "tensor_writer", "writer", "staging"}
WITH_TORCH |= {"dtensors", "joint", "shard_writer", "shard_reader"}
LOOKING = [path for path in PRODUCT if path.parent.name in ("checkpoint", "cli")]


@pytest.mark.parametrize("path", LOOKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_looks_at_a_checkpoint_imports_no_torch_as_it_is_imported(path: Path) -> None:
    tree = read_tree(path)
    tree.body = [node for node in tree.body if not isinstance(node, ast.If | ast.FunctionDef)]
    for node in ast.walk(tree):  # what stands in a function is imported when that is called
        if isinstance(node, ast.ClassDef):
            node.body = [each for each in node.body if not isinstance(each, ast.FunctionDef)]
    imported = set(list_imports(tree))
    found = imported & {"torch", *(f"hookbus.checkpoint.{name}" for name in WITH_TORCH)}
    assert bool(found) == (path.parent.name == "checkpoint" and path.stem in WITH_TORCH), found


@pytest.mark.parametrize("path", PRODUCT, ids=IDS)
def test_hookbus_shows_no_import_of_a_plugin_in_its_docstrings(path: Path) -> None:
    if path.is_relative_to(ROOT / "hookbus"):
        assert not re.search(r"(import|from) builtin_plugins", path.read_text(encoding="utf-8"))


UNSAFE = {"cloudpickle", "dill", "marshal", "pickle", "shelve", "_pickle"}


@pytest.mark.parametrize("path", PRODUCT, ids=IDS)
def test_nothing_is_unpickled_and_no_text_becomes_code(path: Path) -> None:
    """Source: huggingface/transformers#43140, NVIDIA-NeMo/Automodel#3240"""
    tree = read_tree(path)
    assert not UNSAFE & {name.split(".")[0] for name in list_imports(tree)}
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"eval", "exec", "compile", "__import__", "torch.load", "torch.save"}
    if path.is_relative_to(ROOT / "hookbus" / "checkpoint"):
        assert "importlib.import_module" not in calls


# -- names and text -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PRODUCT, ids=IDS)
def test_every_file_says_what_it_is_and_names_nothing_vaguely(path: Path) -> None:
    text, tree = path.read_text(encoding="utf-8"), read_tree(path)
    assert ast.get_docstring(tree)
    assert path.name == "__init__.py" or "from __future__ import annotations\n" in text
    assert not set(path.relative_to(ROOT).with_suffix("").parts) & {"utils", "helpers", "common"}
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if re.search(r"(Manager|Base|Helper)$|^Base", name)]
    assert not re.search(r"§|design\.md|cases\.md|/(work|opt|tmp)/", text, re.IGNORECASE)


def list_messages(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the beginning and the end of each error's text, as far as they are plain."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("Error")
            and ast.unparse(node.func) != "WriteError"  # its arguments are those of an OSError
            and node.args
        ):
            text = node.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            yield (
                *(part.value if isinstance(part, ast.Constant) else "" for part in parts[:1]),
                *(part.value if isinstance(part, ast.Constant) else "" for part in parts[-1:]),
            )


@pytest.mark.parametrize("path", PRODUCT, ids=IDS)
def test_messages_are_lower_case_without_a_period(path: Path) -> None:
    for beginning, end in list_messages(read_tree(path)):
        assert not re.match(r"[A-Z](?!one cannot)", beginning), beginning
        assert not end.rstrip().endswith("."), end


def is_documented(thing: object) -> bool:
    return bool(inspect.getdoc(thing))


@pytest.mark.parametrize("package", [hookbus, builtin_plugins], ids=lambda each: each.__name__)
def test_all_names_every_public_thing_and_each_has_a_docstring(package: ModuleType) -> None:
    found = {name: getattr(package, name) for name in dir(package) if not name.startswith("_")}
    public = {
        name
        for name, value in found.items()
        if not isinstance(value, ModuleType) or value is errors
    }
    assert set(package.__all__) == public
    assert list(package.__all__) == sorted(package.__all__)
    for name in public:
        assert is_documented(getattr(package, name)), name


@pytest.mark.parametrize(
    "public",
    [hookbus.HookBus, hookbus.Resume, hookbus.Save, hookbus.Report, hookbus.Checkpoint],
    ids=lambda each: each.__name__,
)
def test_every_public_method_has_a_docstring_in_the_imperative(public: type) -> None:
    for name, value in vars(public).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            text = inspect.getdoc(value)
            assert text, name
            assert re.match(r"[A-Z][a-z]+[^s] |Whether |Fire", text), (name, text)


# -- errors -------------------------------------------------------------------------------------


def read_error_tree() -> dict[str, tuple[str | None, str | None, str]]:
    """Return, for each error in the docstring, its parent, its second base and its words."""
    found: dict[str, tuple[str | None, str | None, str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(
            r"    (?P<bars>[│├└─ ]*)(?P<name>\w+)(\s+\((?P<base>\w+)\))?(?P<words>.*)", line
        )
        if match:
            depth = len(match["bars"]) // 4
            path[depth:] = [match["name"]]
            parent = path[depth - 1] if depth else None
            found[match["name"]] = parent, match["base"], match["words"].strip()
    return found


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    tree = read_error_tree()
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.HookbusError)
    }
    assert list(tree) == list(classes)
    for name, (parent, base, words) in tree.items():
        cls = classes[name]
        assert cls.__bases__[0] is (classes[parent] if parent else Exception), name
        others = [each.__name__ for each in cls.__bases__[1:]]
        assert others == ([base] if base else []), name
        assert is_documented(cls), name
        assert words or name == "HookbusError"


# -- events -------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_typed_documented_and_has_no_body(event: str) -> None:
    function = getattr(hookspecs, event)
    tree = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert len(tree.body) == 1, "nothing but the docstring"
    doc = inspect.getdoc(function) or ""
    assert re.match(r"(Fire|Ask)[ ,]", doc), "it says first when it fires"
    assert doc.splitlines()[0].endswith(".")
    for name, parameter in inspect.signature(function).parameters.items():
        assert parameter.annotation is not parameter.empty, name
        assert parameter.default is parameter.empty, name
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, name
    assert "return" in function.__annotations__


def test_every_built_in_plugin_comes_by_an_entry_point_that_loads() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["entry-points"]["hookbus"]
    bus = hookbus.HookBus()
    assert bus.failed == ()
    assert {each.name for each in bus.plugins if each.origin == "built in"} == declared.keys()
    for target in declared.values():
        module, _, attribute = target.partition(":")
        loaded = importlib.import_module(module)
        assert not attribute or hasattr(loaded, attribute)


def test_the_rules_would_see_a_breach() -> None:
    """Negative control: what each rule looks for is found where it is."""
    tree = ast.parse(
        "import pickle\nfrom hookbus.bus import HookBus\nfrom hookbus import errors\n"
        "if TYPE_CHECKING:\n    import shelve\nraise ValueError(f'Upper {x}.')\n"
    )
    assert list(list_imports(tree)) == ["pickle", "hookbus.bus", "hookbus.errors"]
    assert list(list_messages(tree)) == [("Upper ", ".")]


def test_the_rooms_of_the_package_are_there_without_an_import_of_their_own() -> None:
    script = (
        "import hookbus, sys; assert 'torch' not in sys.modules;"
        " print(hookbus.hookspecs.__name__, hookbus.testing.__name__, hasattr(hookbus, 'nope'))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.split() == ["hookbus.hookspecs", "hookbus.testing", "False"]
