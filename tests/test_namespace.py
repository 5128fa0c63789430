"""The package's namespace: lazy, complete, and known to type checkers."""

import ast
import importlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import kimi_jax as kj

LOOK = """
import sys
import kimi_jax
loaded = sorted({name.split(".")[0] for name in sys.modules} & {"jax", "flax", "numpy", "rich"})
print(loaded, "Model" in dir(kimi_jax), "load" in kimi_jax.__all__)
"""


def test_importing_the_package_imports_nothing_else():
    ran = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split("\n")[0] == "[] True True"


def test_every_name_is_that_of_its_module():
    assert kj.__all__ == sorted(set(kj.__all__))
    for name, module in kj._MODULES.items():
        value = getattr(kj, name)
        assert value is getattr(importlib.import_module(f"kimi_jax.{module}"), name)
        assert name.isupper() or value.__module__ == f"kimi_jax.{module}", name
        assert value.__doc__ and name in dir(kj)


def test_the_listing_is_the_interface_and_no_module():
    kj.load  # noqa: B018 - imports most of the package
    public = [name for name in dir(kj) if not name.startswith("_")]
    assert public == kj.__all__
    assert re.fullmatch(r"\d+\.\d+\.\d+", kj.__version__) and "__version__" in dir(kj)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"kimi_jax.*has no attribute 'Modell'"):
        _ = kj.Modell


def test_the_stub_says_the_same():
    tree = ast.parse((ROOT / "kimi_jax" / "__init__.pyi").read_text())
    said = {
        alias.asname: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert said == kj._MODULES
