"""The table of files in the README: every file is in it, and imports only files of lower rank."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxpaged", "pallas_kernels")
JAX = {"jax", "jaxlib", "flax", "orbax"}
KERNEL_IMPORTS = {"jax", "numpy", "pallas_kernels"}

Rank = float


def read_ranks(markdown: str) -> dict[str, Rank]:
    """Path → rank, from the table `| rank | file | holds |`. A path that ends in "/" stands for the files below it.

    "–" as rank: files that import no file of the project but those of their own row.
    """
    ranks = {}
    lines = iter(markdown.splitlines())
    for line in lines:
        if re.fullmatch(r"\|\s*rank\s*\|\s*file\s*\|\s*holds\s*\|", line.strip()):
            break
    else:
        raise ValueError("there is no table | rank | file | holds |")
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            break
        rank, files = (cell.strip() for cell in line.split("|")[1:3])
        for path in re.findall(r"`([^`]+)`", files):
            full = path if path.startswith(PACKAGES) else f"jaxpaged/{path}"
            if full in ranks:
                raise ValueError(f"{full} is in the table twice")
            ranks[full] = -1 if rank in ("–", "-") else int(rank)
    return ranks


def row_of(path: str, ranks: dict[str, Rank]) -> str | None:
    """The path itself if it is in the table, else the closest folder above it that is."""
    if path in ranks:
        return path
    folders = [row for row in ranks if row.endswith("/") and path.startswith(row)]
    return max(folders, key=len, default=None)


def modules_in(root: Path) -> dict[str, str]:
    """Dotted module name → path relative to root, of all files of both packages."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    paths = [file.relative_to(root).as_posix() for file in files]
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}


def imported_by(source: str) -> set[str]:
    """Dotted names that a source text imports, anywhere in it: `from a import b` gives "a.b"."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def violations(root: Path, ranks: dict[str, Rank]) -> list[str]:
    """Sentences on what breaks the rules; empty when nothing does."""
    modules = modules_in(root)
    found = [f"{row} is in the table, but not there" for row in ranks if not (root / row).exists()]
    for path in modules.values():
        row = row_of(path, ranks)
        if row is None:
            found.append(f"{path} is not in the table")
            continue
        for name in sorted(imported_by((root / path).read_text(encoding="utf-8"))):
            top = name.split(".")[0]
            if top == "":
                found.append(f"{path} imports {name}: imports are absolute")
            elif top in JAX and 0 <= ranks[row] <= 2:
                found.append(f"{path} has rank {ranks[row]} and imports {top}")
            elif path.startswith("pallas_kernels") and top == "jaxpaged":
                found.append(f"{path} imports {name}: kernels import jax and themselves only")
            elif top in ("scripts", "tests"):
                found.append(f"{path} imports {name}")
            elif top in PACKAGES:
                target = modules.get(name) or modules.get(name.rpartition(".")[0])
                if target is None:
                    found.append(f"{path} imports {name}, which is no file of the project")
                    continue
                target_row = row_of(target, ranks)
                if target_row is not None and target_row != row and ranks[target_row] >= ranks[row]:
                    found.append(f"{path} (rank {ranks[row]}) imports {target} (rank {ranks[target_row]})")
    return found


def test_a_file_imports_only_files_of_lower_rank_and_every_file_is_in_the_readmes_table():
    ranks = read_ranks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert violations(ROOT, ranks) == []


def test_kernels_import_jax_numpy_the_standard_library_and_themselves_only():
    import sys

    for path in modules_in(ROOT).values():
        if path.startswith("pallas_kernels"):
            tops = {name.split(".")[0] for name in imported_by((ROOT / path).read_text(encoding="utf-8"))}
            assert tops <= KERNEL_IMPORTS | sys.stdlib_module_names, path


def test_nothing_but_scripts_and_tests_imports_them():
    scripts = {file.stem for file in (ROOT / "scripts").glob("*.py")}
    for path in modules_in(ROOT).values():
        tops = {name.split(".")[0] for name in imported_by((ROOT / path).read_text(encoding="utf-8"))}
        assert not tops & (scripts | {"scripts", "tests", "tiny", "toy_device"}), path


TABLE = """
| rank | file | holds |
|---|---|---|
| 0 | `jaxpaged/low.py` | … |
| 3 | `jaxpaged/high.py`, `models/layers.py` | … |
| 5 | `jaxpaged/__init__.py` | … |
| 4 | `jaxpaged/models/` | … |
| – | `pallas_kernels/` | … |

| rank | after the table |
"""


def project(root: Path, **sources: str) -> Path:
    files = {"jaxpaged/low.py", "jaxpaged/high.py", "jaxpaged/__init__.py", "jaxpaged/models/__init__.py"}
    for path in sorted(files | {"jaxpaged/models/layers.py", "pallas_kernels/__init__.py"}):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(sources.get(Path(path).stem, ""))
    return root


def test_the_table_is_read_with_several_files_in_a_row_and_folders():
    assert read_ranks(TABLE) == {
        "jaxpaged/low.py": 0,
        "jaxpaged/high.py": 3,
        "jaxpaged/models/layers.py": 3,
        "jaxpaged/__init__.py": 5,
        "jaxpaged/models/": 4,
        "pallas_kernels/": -1,
    }


def test_a_project_that_keeps_the_rules_has_no_violations(tmp_path):
    root = project(tmp_path, high="import jax\nfrom jaxpaged.low import x\nfrom jaxpaged import low", low="import re")
    assert violations(root, read_ranks(TABLE)) == []


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"low": "from jaxpaged.high import x"}, "jaxpaged/low.py (rank 0) imports jaxpaged/high.py (rank 3)"),
        ({"low": "from jaxpaged import high"}, "jaxpaged/low.py (rank 0) imports jaxpaged/high.py (rank 3)"),
        ({"low": "import jaxpaged.high"}, "jaxpaged/low.py (rank 0) imports jaxpaged/high.py (rank 3)"),
        ({"low": "def f():\n    import jaxpaged.high"}, "jaxpaged/low.py (rank 0) imports jaxpaged/high.py (rank 3)"),
        ({"high": "from jaxpaged.models import layers"}, "high.py (rank 3) imports jaxpaged/models/layers.py (rank 3)"),
        ({"low": "import jax.numpy as jnp"}, "jaxpaged/low.py has rank 0 and imports jax"),
        ({"low": "from flax import struct"}, "jaxpaged/low.py has rank 0 and imports flax"),
        ({"low": "from . import high"}, "imports are absolute"),
        ({"low": "import scripts.generate"}, "jaxpaged/low.py imports scripts.generate"),
        ({"high": "from jaxpaged.gone import x"}, "jaxpaged.gone.x, which is no file of the project"),
    ],
)
def test_a_planted_import_is_found(tmp_path, sources, found):
    assert found in "\n".join(violations(project(tmp_path, **sources), read_ranks(TABLE)))


def test_a_kernel_that_imports_the_engine_is_found(tmp_path):
    root = project(tmp_path)
    (root / "pallas_kernels/__init__.py").write_text("from jaxpaged import low")
    assert "kernels import jax and themselves only" in violations(root, read_ranks(TABLE))[0]


def test_a_file_without_a_row_and_a_row_without_a_file_are_found(tmp_path):
    root = project(tmp_path)
    (root / "jaxpaged/new.py").touch()
    (root / "jaxpaged/high.py").unlink()
    assert violations(root, read_ranks(TABLE)) == [
        "jaxpaged/high.py is in the table, but not there",
        "jaxpaged/new.py is not in the table",
    ]
