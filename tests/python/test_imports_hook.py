"""Modules of others that are changed when a program imports them."""

import importlib
import importlib.util
import sys
import zipfile
import zipimport
from importlib.machinery import FrozenImporter

import pytest
from helpers import passes

from torch_offload._imports import when_imported


def test_who_asks_for_a_module_does_not_end_the_wait_for_it():
    program = """
        import importlib.util, sys, torch, torch_offload
        name = "torch.nn.attention.flex_attention"
        for _ in range(2):
            assert importlib.util.find_spec(name) is not None and name not in sys.modules
        from torch.nn.attention.flex_attention import flex_attention
        q = torch.randn(1, 1, 16, 16)
        print(torch.equal(flex_attention(q.to("offload"), q, q), flex_attention(q, q, q)))
    """
    assert passes(program, PYTHONWARNINGS="ignore").split()[-1] == "True"


@pytest.fixture(autouse=True)
def _nothing_is_imported_for_the_next_test():
    modules, finders = set(sys.modules), list(sys.meta_path)
    yield
    assert sys.meta_path == finders
    for name in set(sys.modules) - modules:
        if name.startswith(("offload_", "__")):
            del sys.modules[name]


def test_a_loader_of_several_modules_changes_one(tmp_path, monkeypatch):
    archive = tmp_path / "both.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("offload_zipped_one", "offload_zipped_two"):
            file.writestr(f"{name}.py", "value = __name__")
    monkeypatch.syspath_prepend(str(archive))
    changed = []
    when_imported("offload_zipped_one", lambda module: changed.append(module.value))
    for _ in range(2):
        asked = importlib.util.find_spec("offload_zipped_one").loader
        assert asked.get_source("offload_zipped_one") == "value = __name__"
    two = importlib.import_module("offload_zipped_two")
    assert changed == []
    one = importlib.import_module("offload_zipped_one")
    assert changed == ["offload_zipped_one"]
    assert type(one.__loader__) is zipimport.zipimporter
    assert one.__loader__ is one.__spec__.loader is two.__loader__
    assert "exec_module" not in vars(one.__loader__)
    for module in (two, one):
        assert importlib.reload(module).value == module.__name__
    assert changed == ["offload_zipped_one"]


def test_a_module_of_the_interpreter_itself():
    executes, changed = FrozenImporter.exec_module, []
    when_imported("__hello__", changed.append)
    assert [importlib.import_module("__hello__")] == changed
    assert changed[0].__spec__.loader is FrozenImporter
    importlib.import_module("__phello__")
    assert len(changed) == 1
    assert FrozenImporter.exec_module is executes


def test_an_import_that_fails_may_be_tried_again(tmp_path, monkeypatch):
    (tmp_path / "offload_fails_once.py").write_text("import offload_needed\nvalue = offload_needed.value")
    monkeypatch.syspath_prepend(str(tmp_path))
    when_imported("offload_fails_once", lambda module: setattr(module, "value", module.value + 1))
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="offload_needed"):
            importlib.import_module("offload_fails_once")
    (tmp_path / "offload_needed.py").write_text("value = 3")
    importlib.invalidate_caches()
    for _ in range(2):
        assert importlib.import_module("offload_fails_once").value == 4
