"""No dead configuration: every field of every dataclass of the project is read somewhere outside its class."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [*sorted((ROOT / "jaxpaged").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]

FOR_THE_USER = {"CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "LogitsState"}
"""What `generate` returns, and what logits processors are given: read by whoever called it, or wrote them."""

BY_NAME = {"RowUpdates", "BlockUpdates", "BlockCopies"}
"""Unpacked whole, in the order of their fields (`Runner._updated`, `StepLogprobs(*...)`)."""


def dataclasses_in(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and is_dataclass(node)]


def is_dataclass(node: ast.ClassDef) -> bool:
    is_tuple = "NamedTuple" in map(ast.unparse, node.bases)
    return is_tuple or any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def fields_of(node: ast.ClassDef) -> list[str]:
    return [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "_unsupported(" not in ast.unparse(item)
    ]


def attributes_read(tree: ast.AST) -> Counter[str]:
    """How often each attribute name is read, `x.name` and getattr(x, "name") alike."""
    reads = Counter(n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant):
                reads[str(name.value)] += 1
    return reads


def refused_unless_default(node: ast.ClassDef) -> set[str]:
    """Fields that their own class refuses to take another value for, because nothing is built for them yet."""
    return {
        read.attr
        for test in ast.walk(node)
        if isinstance(test, ast.If) and "not supported yet" in ast.unparse(test)
        for read in ast.walk(test.test)
        if isinstance(read, ast.Attribute)
    }


def fields_never_read(sources: list[str]) -> list[str]:
    """ "Class.field" of every dataclass field that no source reads outside the class's own body."""
    trees = [ast.parse(source) for source in sources]
    everywhere = sum((attributes_read(tree) for tree in trees), Counter())
    unread = []
    for node in (node for tree in trees for node in dataclasses_in(tree)):
        if node.name not in FOR_THE_USER | BY_NAME:
            outside = everywhere - attributes_read(node)
            excused = refused_unless_default(node) | read_by_own_properties(node, outside)
            unread += [f"{node.name}.{name}" for name in fields_of(node) if not outside[name] and name not in excused]
    return unread


def read_by_own_properties(node: ast.ClassDef, outside: Counter[str]) -> set[str]:
    """Fields that methods of the class read, where those methods are themselves used (or are `__str__`)."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    used = {method.name for method in methods if outside[method.name] or method.name == "__str__"}
    while True:
        reads = {name for method in methods if method.name in used for name in attributes_read(method)}
        more = {method.name for method in methods if method.name in reads} - used
        if not more:
            return reads
        used |= more


def test_every_field_of_every_dataclass_is_read_outside_its_class():
    assert fields_never_read([source.read_text(encoding="utf-8") for source in SOURCES]) == []


def test_the_dataclasses_that_matter_are_looked_at():
    names = {node.name for source in SOURCES for node in dataclasses_in(ast.parse(source.read_text(encoding="utf-8")))}
    assert names >= FOR_THE_USER | BY_NAME
    assert names >= {"EngineConfig", "ModelConfig", "DeviceFacts", "RopeScaling", "SamplingParams", "Request"}
    assert names >= {"StartedRow", "ScheduledRequest", "ScheduledStep", "StepInputs", "StepOutput", "MemoryReport"}


@pytest.mark.parametrize(
    ("body", "outside", "unread"),
    [
        ("a: int", "", ["C.a"]),
        ("a: int", "x.a", []),
        ("a: int", "x.a = 1", ["C.a"]),
        ("a: int", "getattr(x, 'a')", []),
        ("a: int\n    def __post_init__(self):\n        check(self.a)", "", ["C.a"]),
        ("a: int\n    @property\n    def b(self):\n        return self.a", "", ["C.a"]),
        ("a: int\n    @property\n    def b(self):\n        return self.a", "x.b", []),
        ("a: int\n    def __str__(self):\n        return self.b()\n    def b(self):\n        return self.a", "", []),
        ("a: int\n    def f(self):\n        if self.a:\n            raise ValueError('not supported yet')", "", []),
    ],
)
def test_a_field_that_nobody_reads_is_found(body, outside, unread):
    assert fields_never_read([f"@dataclass(frozen=True)\nclass C:\n    {body}\n", outside]) == unread
